"""What the pods' accounts may ask of the API server: endpoint slices of their namespace and nothing else."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from tests.cluster.cluster import Cluster

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")
RESOURCES = (
    ("", "pods"),
    ("", "secrets"),
    ("", "services"),
    ("", "endpoints"),
    ("", "configmaps"),
    ("apps", "deployments"),
    ("discovery.k8s.io", "endpointslices"),
    ("rbac.authorization.k8s.io", "roles"),
)
SLICES = ("discovery.k8s.io", "endpointslices")
READ = {"get", "list", "watch"}
# Follows slices or not, by the chart's default discovery.
MAY_READ = {"router": True, "llm": True, "vision": False}
MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
REQUEST = f"""
import json, os, ssl, sys, urllib.error, urllib.request
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
context = ssl.create_default_context(cafile="{MOUNT}/ca.crt")
headers = {{"Authorization": "Bearer " + open("{MOUNT}/token").read()}}
statuses = []
for path in sys.argv[1:]:
    request = urllib.request.Request(f"https://{{host}}:{{port}}{{path}}", headers=headers)
    try:
        statuses.append(urllib.request.urlopen(request, context=context, timeout=10).status)
    except urllib.error.HTTPError as error:
        statuses.append(error.code)
print(json.dumps(statuses))
"""


def test_the_api_server_grants_the_role_and_no_more(cluster: Cluster, installed: str) -> None:
    asked = [
        (namespace, *resource, verb)
        for namespace, resource, verb in product((cluster.namespace, "kube-system"), RESOURCES, VERBS)
    ]
    for component, may_read in MAY_READ.items():
        (pod,) = cluster.pods(component)
        granted = _allowed(cluster, pod["spec"]["serviceAccountName"], asked)
        wanted = {(cluster.namespace, *SLICES, verb) for verb in READ} if may_read else set()
        assert granted == wanted, component


def test_the_pods_own_token_reads_slices_and_is_refused_the_rest(cluster: Cluster, installed: str) -> None:
    version = cluster.get("endpointslices")[0]["apiVersion"]
    paths = [
        f"/apis/{version}/namespaces/{cluster.namespace}/endpointslices",
        f"/apis/{version}/namespaces/kube-system/endpointslices",
        f"/apis/{version}/endpointslices",
        f"/api/v1/namespaces/{cluster.namespace}/pods",
        f"/api/v1/namespaces/{cluster.namespace}/secrets",
    ]
    for component, may_read in MAY_READ.items():
        (pod,) = cluster.pods(component)
        name = pod["metadata"]["name"]
        if may_read:
            answered = json.loads(cluster.kubectl("exec", name, "--", "python", "-c", REQUEST, *paths))
            assert answered == [200, 403, 403, 403, 403], component
        else:
            there = cluster.kubectl("exec", name, "--", "python", "-c", f"import os; print(os.path.exists('{MOUNT}'))")
            assert there.strip() == "False", component


def _allowed(cluster: Cluster, account: str, asked: list[tuple[str, str, str, str]]) -> set[tuple[str, str, str, str]]:
    """Those of `asked` (namespace, group, resource, verb) that an account of the cluster's namespace may do."""
    reviews = [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{cluster.namespace}:{account}",
                "groups": [
                    "system:serviceaccounts",
                    f"system:serviceaccounts:{cluster.namespace}",
                    "system:authenticated",
                ],
                "resourceAttributes": {"namespace": namespace, "group": group, "resource": resource, "verb": verb},
            },
        }
        for namespace, group, resource, verb in asked
    ]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
    # One JSON object after the other, in the order asked.
    text = cluster.kubectl("create", "-f", "-", "--output", "json", stdin=listed)
    decoder, answers = json.JSONDecoder(), list[dict[str, Any]]()
    while text := text.lstrip():
        answer, end = decoder.raw_decode(text)
        answers += answer["items"] if answer["kind"] == "List" else [answer]
        text = text[end:]
    return {one for one, answer in zip(asked, answers, strict=True) if answer["status"]["allowed"]}
