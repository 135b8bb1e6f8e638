#!/usr/bin/env bash
# load.sh CACHE [NAME...]: CACHE/images/NAME.tar into the running node, all without names; run inside, or by enter.sh.
# An archive that is loaded already is left out.
set -euo pipefail
cache=$1
shift
mkdir -p "$cache/containerd/loaded"
if [ "$#" -eq 0 ]; then set -- $(cd "$cache/images" && ls *.tar | sed 's/\.tar$//'); fi
for name in "$@"; do
  sum=$(cat "$cache/images/$name.id")
  [ "$(cat "$cache/containerd/loaded/$name" 2>/dev/null)" = "$sum" ] && continue
  ctr images import "$cache/images/$name.tar"
  echo "$sum" > "$cache/containerd/loaded/$name"
done
