#!/usr/bin/env bash
# inside.sh CACHE COMMAND...: the node, run by run.sh as the first work of new mount, network and process namespaces.
set -euo pipefail
cache=$1
shift
here=$(dirname "$(realpath "$0")")
run=$cache/run
state=/run/day0-node
address=10.250.0.1
cd "$run"
mkdir -p log pki etcd kubelet cni bin

start() { # start NAME COMMAND...: in the background, output in log/NAME.log
  local name=$1
  shift
  "$@" >"log/$name.log" 2>&1 </dev/null &
}

wait_for() { # wait_for SECONDS WHAT COMMAND...: until COMMAND succeeds
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    if [ "$SECONDS" -ge "$end" ]; then
      echo "inside.sh: $what not ready in time; last lines of its logs:" >&2
      tail -n 5 log/*.log >&2
      exit 1
    fi
    sleep 0.3
  done
}

# What programs write at fixed places goes with the namespace.
for place in /run /var/log/pods /var/log/containers /var/lib/cni; do
  mkdir -p "$place"
  mount -t tmpfs none "$place"
done
mkdir -p "$state"
printf 'nameserver %s\n' "$address" > resolv.conf
mount --bind resolv.conf "$(realpath /etc/resolv.conf)"
ip link set lo up
ip link add node0 type bridge
ip address add "$address/24" dev node0
ip link set node0 up
# The kubelet wants a default route; nothing is behind this one.
ip route add default via 10.250.0.254 dev node0
sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.route_localnet=1

# Certificates of one run.
openssl genrsa -out pki/service-accounts.key 2048 2>/dev/null
openssl rsa -in pki/service-accounts.key -pubout -out pki/service-accounts.pub 2>/dev/null
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=day0-test -keyout pki/ca.key -out pki/ca.crt 2>/dev/null
certificate() { # certificate NAME SUBJECT NAMES
  openssl req -newkey rsa:2048 -nodes -subj "$2" -keyout "pki/$1.key" -out "pki/$1.csr" 2>/dev/null
  openssl x509 -req -in "pki/$1.csr" -CA pki/ca.crt -CAkey pki/ca.key -CAcreateserial -days 2 -out "pki/$1.crt" \
    -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth' "$3") 2>/dev/null
}
kubeconfig() { # kubeconfig NAME
  cat > "pki/$1.kubeconfig" <<K
apiVersion: v1
kind: Config
clusters: [{name: node, cluster: {server: "https://127.0.0.1:6443", certificate-authority: $run/pki/ca.crt}}]
users: [{name: $1, user: {client-certificate: $run/pki/$1.crt, client-key: $run/pki/$1.key}}]
contexts: [{name: node, context: {cluster: node, user: $1}}]
current-context: node
K
}
certificate apiserver /CN=kube-apiserver \
  "IP:127.0.0.1,IP:$address,IP:10.96.0.1,DNS:localhost,DNS:kubernetes.default.svc"
certificate admin /O=system:masters/CN=admin DNS:admin
certificate controllers /CN=system:kube-controller-manager DNS:controllers
certificate scheduler /CN=system:kube-scheduler DNS:scheduler
certificate proxy /CN=system:kube-proxy DNS:proxy
certificate node /O=system:nodes/CN=system:node:node1 "DNS:node1,IP:$address"
for user in admin controllers scheduler proxy node; do kubeconfig "$user"; done

start etcd etcd --data-dir etcd --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
  --listen-peer-urls http://127.0.0.1:2380 --unsafe-no-fsync
start apiserver "$cache/bin/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 \
  --advertise-address="$address" --secure-port=6443 --service-cluster-ip-range=10.96.0.0/16 \
  --client-ca-file=pki/ca.crt --tls-cert-file=pki/apiserver.crt --tls-private-key-file=pki/apiserver.key \
  --service-account-key-file=pki/service-accounts.pub --service-account-signing-key-file=pki/service-accounts.key \
  --service-account-issuer=https://kubernetes.default.svc --kubelet-preferred-address-types=InternalIP \
  --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
  --kubelet-client-certificate=pki/admin.crt --kubelet-client-key=pki/admin.key

cat > containerd.toml <<C
version = 2
root = "$cache/containerd"
state = "$state/containerd"
[grpc]
  address = "$state/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/day0-pause:test"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$run/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
C
# Routed, not bridged: answers through a Service's address pass the node's rules without br_netfilter.
cat > cni/10-pods.conflist <<C
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "ptp", "ipMasq": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
C
# Containers of a node that was killed would be taken for this one's; its images go with them.
[ -e "$cache/containerd/in-use" ] && rm -rf "$cache/containerd"
mkdir -p "$cache/containerd"
touch "$cache/containerd/in-use"
start containerd containerd --config "$run/containerd.toml"
export CONTAINERD_ADDRESS=$state/containerd.sock CONTAINERD_NAMESPACE=k8s.io
wait_for 30 containerd ctr version
"$here/load.sh" "$cache"

export KUBECONFIG=$run/pki/admin.kubeconfig PATH=$cache/bin:$PATH
wait_for 60 "API server" kubectl get --raw /readyz
start controllers kube-controller-manager --kubeconfig=pki/controllers.kubeconfig --leader-elect=false \
  --service-account-private-key-file=pki/service-accounts.key --root-ca-file=pki/ca.crt \
  --cluster-signing-cert-file=pki/ca.crt --cluster-signing-key-file=pki/ca.key --use-service-account-credentials=true \
  --cluster-cidr=10.244.0.0/16 --allocate-node-cidrs=false
start scheduler kube-scheduler --kubeconfig=pki/scheduler.kubeconfig --leader-elect=false
cat > kubelet.yaml <<K
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {x509: {clientCAFile: $run/pki/ca.crt}, anonymous: {enabled: false}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
failSwapOn: false
maxOpenFiles: 20000
oomScoreAdj: 0
clusterDNS: ["$address"]
clusterDomain: cluster.local
tlsCertFile: $run/pki/node.crt
tlsPrivateKeyFile: $run/pki/node.key
evictionHard: {memory.available: "100Mi", nodefs.available: "1%", imagefs.available: "1%"}
imageGCHighThresholdPercent: 100
resolvConf: $run/resolv.conf
K
start kubelet kubelet --config="$run/kubelet.yaml" --kubeconfig=pki/node.kubeconfig --hostname-override=node1 \
  --node-ip="$address" --container-runtime=remote --container-runtime-endpoint="unix://$state/containerd.sock" \
  --root-dir="$run/kubelet" --network-plugin=cni --cni-conf-dir="$run/cni" --cni-bin-dir=/usr/lib/cni \
  --pod-infra-container-image=localhost/day0-pause:test
cat > proxy.yaml <<P
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: $run/pki/proxy.kubeconfig}
mode: iptables
clusterCIDR: 10.244.0.0/16
hostnameOverride: node1
iptables: {minSyncPeriod: 0s}
conntrack: {maxPerCore: 0, min: 0}
P
start proxy kube-proxy --config="$run/proxy.yaml"
touch hosts.txt
start dnsmasq dnsmasq --keep-in-foreground --user=root --group=root --pid-file= --no-resolv --no-hosts --addn-hosts="$run/hosts.txt" \
  --listen-address="$address" --bind-interfaces --local-ttl=0 --address=/#/
dnsmasq=$!
start names python3 "$here/names.py" "$run" "$dnsmasq"
wait_for 60 node bash -c "kubectl get nodes | grep -q ' Ready'"
echo "node ready after $SECONDS s"
touch ready

cd - >/dev/null
status=0
"$@" || status=$?
# Images stay for the next node of this cache, containers do not.
kubectl delete pods --all --all-namespaces --force --grace-period=0 >/dev/null 2>&1 || true
ctr task list --quiet | xargs -r -n 1 ctr task delete --force >/dev/null 2>&1 || true
ctr container list --quiet | xargs -r ctr container delete >/dev/null 2>&1 || true
[ -z "$(ctr container list --quiet)" ] && rm -f "$cache/containerd/in-use"
exit "$status"
