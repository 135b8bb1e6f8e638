#!/usr/bin/env bash
# build_images.sh CACHE [NAME...]: images without a registry, as localhost/day0-NAME:test and CACHE/images/NAME.tar.
# NAME is router, vision or llm, and for the tests alone pause or bucket; without names all of them.
# The base is made by debootstrap and the wheels are fetched once, both kept in CACHE. Layers are podman's own cache.
set -euo pipefail
cache=$(realpath -m "${1:?usage: build_images.sh CACHE [NAME...]}")
shift
[ "$#" -gt 0 ] || set -- pause bucket router vision llm
here=$(dirname "$(realpath "$0")")
root=$(realpath "$here/../..")
python=${PYTHON:-$root/.venv/bin/python}
base=localhost/day0-base:bookworm
cd "$root"
mkdir -p "$cache/images" "$cache/wheels"
exec 9>"$cache/images.lock"
flock 9

if [ "$(id -u)" -ne 0 ]; then
  echo "build_images.sh: debootstrap needs root; with a registry: docker build --target router|vision|llm ." >&2
  exit 1
fi
tests/cluster/node/packages.sh
cat > "$cache/containers.conf" <<'C'
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=30000:30000"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "runc"
C
export CONTAINERS_CONF=$cache/containers.conf

if ! podman image exists "$base"; then
  echo "base image: Debian bookworm by debootstrap"
  rootfs=$(mktemp -d "$cache/rootfs.XXXX")
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$rootfs" \
    http://deb.debian.org/debian >"$cache/debootstrap.log" 2>&1 || { tail -n 20 "$cache/debootstrap.log"; exit 1; }
  rm -rf "$rootfs"/var/cache/apt/archives/* "$rootfs"/var/lib/apt/lists/*
  tar -C "$rootfs" -c . | podman import --quiet - "$base"
  rm -rf "$rootfs"
fi

# Wheels for the image's Python, whatever this machine's is; pip's settings of this machine hold.
"$python" tools/list_requirements.py pyproject.toml router vision llm cluster > "$cache/requirements.new"
printf 'moto[s3]>=5.2\nflask\nflask-cors\n' >> "$cache/requirements.new"
wanted=$(cat "$cache/requirements.new" constraints.txt | sha256sum)
if [ "$(cat "$cache/wheels.sum" 2>/dev/null)" != "$wanted" ]; then
  platforms=(manylinux_2_34_x86_64 manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux_2_5_x86_64
    manylinux1_x86_64)
  rm -rf "$cache/wheels"
  mkdir "$cache/wheels"
  for_image=(--quiet --dest "$cache/wheels" -c constraints.txt --only-binary=:all: --python-version 3.11
    "${platforms[@]/#/--platform=}")
  # torch alone, so that nothing else is looked for in its index: what is at hand already, else the CPU build.
  "$python" -m pip download "${for_image[@]}" --no-deps --no-index torch 2>/dev/null \
    || "$python" -m pip download "${for_image[@]}" --no-deps --retries 1 --timeout 60 \
      --extra-index-url "${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}" torch
  "$python" -m pip download "${for_image[@]}" --find-links "$cache/wheels" -r "$cache/requirements.new" pip setuptools
  echo "$wanted" > "$cache/wheels.sum"
fi

for name in "$@"; do
  case "$name" in
    pause)
      mkdir -p "$cache/pause"
      cp /usr/bin/catatonit "$cache/pause/"
      arguments=(--file tests/cluster/images/Pause.Dockerfile "$cache/pause")
      ;;
    bucket) arguments=(--file tests/cluster/images/Bucket.Dockerfile .) ;;
    router | vision | llm) arguments=(--target "$name" .) ;;
    *)
      echo "build_images.sh: $name is none of pause, bucket, router, vision, llm" >&2
      exit 1
      ;;
  esac
  podman build --quiet --network host --volume "$cache/wheels:/wheelhouse:ro" --build-arg BASE="$base" \
    --build-arg PIP_FIND_LINKS=/wheelhouse --build-arg PIP_NO_INDEX=1 --tag "localhost/day0-$name:test" \
    "${arguments[@]}" >"$cache/images/$name.log" 2>&1 || { tail -n 30 "$cache/images/$name.log"; exit 1; }
  id=$(podman image inspect --format '{{.Id}}' "localhost/day0-$name:test")
  if [ "$(cat "$cache/images/$name.id" 2>/dev/null)" != "$id" ]; then
    rm -f "$cache/images/$name.new"
    podman save --quiet --output "$cache/images/$name.new" "localhost/day0-$name:test"
    mv "$cache/images/$name.new" "$cache/images/$name.tar"
    echo "$id" > "$cache/images/$name.id"
  fi
done
podman images --filter reference='localhost/day0-*:test' --format '{{.Repository}} {{.Size}}'
