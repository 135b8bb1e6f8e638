#!/usr/bin/env bash
# Installs the Debian packages that the node and the images are made with; does nothing where all are there.
set -euo pipefail

packages=(golang-go etcd-server dpkg-dev jq rsync make containerd runc containernetworking-plugins iptables iproute2
  util-linux catatonit podman buildah debootstrap dnsmasq-base openssl curl ca-certificates)

missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ "${#missing[@]}" -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ]; then
  echo "packages.sh: must be root to install ${missing[*]}" >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
# The packages start services of their own; the node has its own etcd and containerd.
for unit in etcd containerd; do systemctl disable --now "$unit" 2>/dev/null || true; done
