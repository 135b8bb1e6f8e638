#!/usr/bin/env bash
# The cluster's tests on kind: builds the images with docker, makes a cluster, loads, tests, deletes it.
# Needs docker, kind, kubectl and helm 4, and a registry for the base image and for kind's node.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/../.."
work=$(mktemp -d)
trap 'kind delete cluster --name day0-test; rm -rf "$work"' EXIT
for target in router vision llm; do
  docker build --target "$target" --tag "localhost/day0-$target:test" .
done
docker build --file tests/cluster/images/Bucket.Dockerfile --tag localhost/day0-bucket:test .
kind create cluster --config tests/kind/cluster.yaml --kubeconfig "$work/kubeconfig" --wait 120s
for name in router vision llm bucket; do kind load docker-image "localhost/day0-$name:test" --name day0-test; done
mkdir "$work/bin"
ln -s "$(command -v helm)" "$(command -v kubectl)" "$work/bin/"
make test-cluster CLUSTER_KUBECONFIG="$work/kubeconfig" CLUSTER_ARGS="--probes grpc --binaries $work/bin $*"
