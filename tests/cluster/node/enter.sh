#!/usr/bin/env bash
# enter.sh CACHE COMMAND...: COMMAND beside the running node of CACHE, with its kubeconfig, helm, kubectl and ctr.
set -euo pipefail
cache=$(realpath "${1:?usage: enter.sh CACHE COMMAND...}")
shift
export KUBECONFIG=$cache/run/pki/admin.kubeconfig PATH=$cache/bin:$PATH
export CONTAINERD_ADDRESS=/run/day0-node/containerd.sock CONTAINERD_NAMESPACE=k8s.io
exec nsenter --target "$(cat "$cache/run/init.pid")" --mount --net --pid --wd="$PWD" -- "$@"
