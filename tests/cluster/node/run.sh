#!/usr/bin/env bash
# run.sh CACHE COMMAND...: a Kubernetes node in namespaces of its own, COMMAND inside them with KUBECONFIG set, then nothing.
# Links, rules, mounts and processes end with the namespaces; cgroups and kernel settings are put back here.
set -uo pipefail
cache=$(realpath "${1:?usage: run.sh CACHE COMMAND...}")
shift
here=$(dirname "$(realpath "$0")")
settings=(kernel.panic kernel.panic_on_oops vm.overcommit_memory)

if [ "$(id -u)" -ne 0 ]; then
  echo "run.sh: a node needs root, for namespaces, cgroups and mounts; or give a cluster: make test-cluster CLUSTER_KUBECONFIG=..." >&2
  exit 1
fi
if ! refusal=$(unshare --mount --net --pid --fork --mount-proc true 2>&1); then
  echo "run.sh: this machine allows no namespaces ($refusal); give a cluster: make test-cluster CLUSTER_KUBECONFIG=..." >&2
  exit 1
fi
if ! [ -d /sys/fs/cgroup/memory ] || ! [ -d /sys/fs/cgroup/systemd ]; then
  echo "run.sh: the node's kubelet (1.20) needs the cgroup v1 hierarchies under /sys/fs/cgroup, memory and systemd among" \
    "them; give a cluster: make test-cluster CLUSTER_KUBECONFIG=..." >&2
  exit 1
fi
exec 9>"$cache/node.lock"
if ! flock -n 9; then
  echo "run.sh: a node of $cache is running already" >&2
  exit 1
fi

saved=()
for setting in "${settings[@]}"; do saved+=("$setting=$(sysctl -n "$setting")"); done
node=
clean_up() {
  [ -n "$node" ] && kill -KILL "$node" 2>/dev/null
  # The kubelet changes these for the whole machine.
  sysctl -qw "${saved[@]}"
  for _ in $(seq 50); do
    find /sys/fs/cgroup -depth -type d -path '*/kubepods*' -exec rmdir {} + 2>/dev/null
    [ -z "$(find /sys/fs/cgroup -maxdepth 2 -name kubepods)" ] && break
    sleep 0.2
  done
  rm -rf "$cache/run"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

rm -rf "$cache/run"
mkdir -p "$cache/run"
# The first process of the namespace takes over orphans; when it ends, all end.
unshare --mount --net --pid --fork --kill-child --mount-proc \
  catatonit -- bash "$here/inside.sh" "$cache" "$@" 9>&- &
node=$!
for _ in $(seq 100); do
  child=$(cat "/proc/$node/task/$node/children" 2>/dev/null) && [ -n "$child" ] && break
  sleep 0.05
done
echo "${child%% *}" > "$cache/run/init.pid"
wait "$node"
status=$?
node=
exit "$status"
