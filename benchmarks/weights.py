"""Measures how fast, and in how much memory, a checkpoint is read from disk and from S3 on loopback; serves no model.

Run it from the repository with `python -m benchmarks.weights`. Every repeat is a process of its own; its clock starts
after the imports and stops when it holds all tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MIB = 1024 * 1024
TENSOR_MIB = (64, 16, 48, 32)
# What the issue allows beyond model and budget: interpreter, libraries, requests under way.
ALLOWED_BEYOND_BYTES = 200 * MIB
LIBRARIES = ("torch", "safetensors", "obstore", "boto3", "moto", "runai-model-streamer", "runai-model-streamer-s3")
BUCKET, PREFIX = "models", "tiny"
URI = f"s3://{BUCKET}/{PREFIX}"
SECONDS_LIMIT = 300

Tensors = dict[str, Any]


def write_checkpoint(folder: Path, size_bytes: int, shards: int) -> int:
    """Random BF16 tensors with an index and a manifest; gives the bytes of all tensors."""
    from svc_common.digests import make_manifest
    from svc_common.manifest import write_manifest
    from svc_common.object_store import ObjectStore
    from svc_common.piece_reader import ReadLimits

    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        sizes: list[int] = []
        left = size_bytes // shards // 4096 * 4096
        while left:
            sizes.append(min(left, TENSOR_MIB[len(sizes) % len(TENSOR_MIB)] * MIB))
            left -= sizes[-1]
        header: dict[str, Any] = {}
        place = 0
        for number, size in enumerate(sizes):
            name = f"layers.{shard}.{number}.weight"
            header[name] = {"dtype": "BF16", "shape": [size // 4096, 2048], "data_offsets": [place, place + size]}
            weight_map[name] = file
            place += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for size in sizes:
                out.write(os.urandom(size))
        total += place
    (folder / "config.json").write_text("{}")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    store = ObjectStore(str(folder))
    # Small, so that this process stays smaller than any it starts: a child's peak begins with its parent's.
    write_manifest(store, make_manifest(store, limits=ReadLimits(32 * MIB, 8 * MIB, 2)))
    return total


def upload(folder: Path, endpoint: str) -> None:
    """Puts every file of the folder under URI."""
    client = s3_client(endpoint)
    for path in sorted(folder.iterdir()):
        with path.open("rb") as body:
            client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{path.name}", Body=body)


def s3_client(endpoint: str) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=endpoint)


def day0_stream(place: str, budget_bytes: int) -> Tensors:
    """Our own reader, every tensor checked against the manifest."""
    import torch

    from llm_svc.streamed import stream_tensors
    from svc_common.checkpoint_source import CheckpointSource

    source = CheckpointSource(place, require_manifest=True, budget_bytes=budget_bytes)
    try:
        held = stream_tensors(source.weights(), lambda done, expected: None, {}, torch.bfloat16)
        return {name: tensor[...] for name, tensor in held.items()}
    finally:
        source.close()


def mapped(place: str, budget_bytes: int) -> Tensors:
    """safetensors' own reader: each tensor copied out of the mapped file. It has no budget."""
    from safetensors import safe_open

    tensors = {}
    for path in sorted(Path(place).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensors[name] = file.get_tensor(name).clone()
    return tensors


def boto3_whole(place: str, budget_bytes: int) -> Tensors:
    """One request for each file, its body whole in memory; tensors are views of it. It has no budget."""
    import torch

    client = s3_client(os.environ["AWS_ENDPOINT_URL"])
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=PREFIX)["Contents"]
    tensors = {}
    for key in sorted(item["Key"] for item in listed if item["Key"].endswith(".safetensors")):
        body = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        begin = 8 + int.from_bytes(body[:8], "little")
        for name, entry in json.loads(body[8:begin]).items():
            start, stop = entry["data_offsets"]
            raw = torch.frombuffer(body, dtype=torch.bfloat16, offset=begin + start, count=(stop - start) // 2)
            tensors[name] = raw.reshape(entry["shape"])
    return tensors


def runai_stream(place: str, budget_bytes: int) -> Tensors:
    """runai-model-streamer; what it yields belongs to the caller."""
    streamer = importlib.import_module("runai_model_streamer")
    files = sorted(streamer.list_safetensors(place))
    with streamer.SafetensorsStreamer() as stream:
        stream.stream_files(files)
        return dict(stream.get_tensors())


READERS: dict[str, Callable[[str, int], Tensors]] = {
    "day0": day0_stream,
    "mmap": mapped,
    "boto3": boto3_whole,
    "runai": runai_stream,
}


# Imported before the clock starts, and part of what a process holds before loading.
IMPORTS: dict[str, list[str]] = {
    "day0": ["obstore.store", "llm_svc.streamed"],
    "mmap": [],
    "boto3": ["boto3"],
    "runai": ["runai_model_streamer"],
}


def load_once(reader: str, place: str, budget_bytes: int) -> dict[str, Any]:
    """What one process measured of itself; sizes in bytes. `sample` covers both ends of every tensor."""
    import torch

    torch.set_num_threads(1)
    for module in IMPORTS[reader]:
        importlib.import_module(module)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    begin, cpu_begin = time.perf_counter(), time.process_time()
    tensors = READERS[reader](place, budget_bytes)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sample = hashlib.sha256()
    for name in sorted(tensors):
        rows = tensors[name].view(torch.uint8)
        sample.update(name.encode() + rows[0].numpy().tobytes() + rows[-1].numpy().tobytes())
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "peak_rss_bytes": peak_bytes,
        "rss_before_bytes": pages * resource.getpagesize(),
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "sample": sample.hexdigest(),
    }


def repeat(case: dict[str, Any], environment: dict[str, str], budget_bytes: int, cold: Path | None) -> dict[str, Any]:
    """One measurement in a fresh process, or `{"failed": why}`."""
    if cold is not None:
        for path in cold.glob("*.safetensors"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-m", "benchmarks.weights", "--budget-mib", str(budget_bytes // MIB)]
    command += ["--reader", case["reader"], "--place", case["place"]]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {SECONDS_LIMIT} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip() or "no message").splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def range_server(folder: Path) -> Iterator[str]:
    """Endpoint of the tests' S3 double, in a process of its own, with the files of the folder in its memory."""
    script = (
        "import pathlib, sys, tests.s3_double as s\n"
        "double = s.S3Double()\n"
        "for path in pathlib.Path(sys.argv[1]).iterdir():\n    double.put(path.name, path.read_bytes())\n"
        "print(double.endpoint, flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    # Its standard error has a traceback for every connection that a client leaves.
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(timeout=30)


def summary(runs: list[dict[str, Any]], model_bytes: int, budget_bytes: int) -> dict[str, Any]:
    """Medians, and the highest peak against the bound: of the whole process, and of what loading added to it."""
    good = [run for run in runs if "failed" not in run]
    if not good:
        return {"failed": runs[0]["failed"]}
    peak = max(run["peak_rss_bytes"] for run in good)
    added = max(run["peak_rss_bytes"] - run["rss_before_bytes"] for run in good)
    bound = model_bytes + budget_bytes + ALLOWED_BEYOND_BYTES
    return {
        "repeats": len(good),
        "bytes_per_second": round(statistics.median(model_bytes / run["seconds"] for run in good)),
        # Of all threads: unlike the rate it depends little on what else the machine does.
        "cpu_seconds": round(statistics.median(run["cpu_seconds"] for run in good), 3),
        "peak_rss_bytes": peak,
        "added_rss_bytes": added,
        "peak_within_bound": peak <= bound,
        "added_within_bound": added <= bound,
    }


def sha256_bytes_per_second() -> int:
    """What a core hashes in a second of its own, the best of five times 64 MiB."""
    content = os.urandom(64 * MIB)
    rates = []
    for _ in range(5):
        begin = time.process_time()
        hashlib.sha256(content)
        rates.append(len(content) / (time.process_time() - begin))
    return round(max(rates))


def library_versions(extra: Path | None) -> dict[str, str]:
    found = {}
    if extra is not None:
        sys.path.append(str(extra))
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, one process at a time."""
    from day0.bench.machine import environment as machine
    from day0.bench.machine import load_average
    from tests.s3_double import moto

    budget_bytes = options.budget_mib * MIB
    path = os.pathsep.join(str(part) for part in (ROOT, ROOT / "kernels", options.runai) if part)
    base = {**os.environ, "PYTHONPATH": path, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    base |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    # boto3 would also checksum what it sends and gets.
    base |= {name: "when_required" for name in ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION")}
    base |= {"AWS_EC2_METADATA_DISABLED": "true", "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    base["RUNAI_STREAMER_MEMORY_LIMIT"] = str(budget_bytes)
    load, hash_rate, cases = load_average(), sha256_bytes_per_second(), []
    with tempfile.TemporaryDirectory(prefix="day0-bench-") as temporary:
        folder = Path(temporary)
        model_bytes = write_checkpoint(folder, int(options.gib * 1024) * MIB, options.shards)
        bound = model_bytes + budget_bytes + ALLOWED_BEYOND_BYTES
        print(f"model {model_bytes / MIB:.0f} MiB, bound {bound / MIB:.0f} MiB", flush=True)

        def run_all(source: str, readers: dict[str, int], place: str, environment: dict[str, str], cold: bool) -> None:
            """The readers take turns, so that what else the machine does meets all of them."""
            runs: dict[str, list[dict[str, Any]]] = {reader: [] for reader in readers}
            for turn in range(max(readers.values())):
                for reader, repeats in readers.items():
                    if turn < repeats and not any("failed" in run for run in runs[reader]):
                        case = {"reader": reader, "place": place}
                        runs[reader].append(repeat(case, environment, budget_bytes, folder if cold else None))
            for reader, found in runs.items():
                cases.append({"reader": reader, "source": source, **summary(found, model_bytes, budget_bytes)})
                cases[-1]["runs"] = found
                print(shown(cases[-1]), flush=True)

        full, few = options.repeats, options.slow_repeats
        run_all("disk, cold", {"day0": full, "mmap": full}, str(folder), base, cold=True)
        run_all("disk, in the page cache", {"day0": full, "mmap": full}, str(folder), base, cold=False)
        with moto() as endpoint:
            os.environ.update({name: value for name, value in base.items() if name.startswith("AWS_")})
            upload(folder, endpoint)
            reached = {**base, "AWS_ENDPOINT_URL": endpoint}
            run_all("moto", {"day0": few, "boto3": full, "runai": few}, URI, reached, cold=False)
        with range_server(folder) as endpoint:
            reached = {**base, "AWS_ENDPOINT_URL": endpoint}
            run_all("range server", {"day0": full, "boto3": full, "runai": full}, URI, reached, cold=False)
    samples = {run["sample"] for case in cases for run in case["runs"] if "sample" in run}
    assert len(samples) == 1, "the readers do not agree on the tensors"
    return {
        "model_bytes": model_bytes,
        "shards": options.shards,
        "budget_bytes": budget_bytes,
        "bound_bytes": bound,
        "environment": {**machine(), **library_versions(options.runai)},
        "load_average_before": load,
        "sha256_bytes_per_second": hash_rate,
        "cases": cases,
    }


def shown(case: dict[str, Any]) -> str:
    """One line of the table of the page."""

    def yes(within: bool) -> str:
        return "yes" if within else "no"

    if "failed" in case:
        return f"| {case['source']} | {case['reader']} | failed: {case['failed']} | | | | | |"
    return (
        f"| {case['source']} | {case['reader']} | {case['bytes_per_second'] / MIB:.0f} | "
        f"{case['cpu_seconds']:.1f} | {case['peak_rss_bytes'] / MIB:.0f} | {yes(case['peak_within_bound'])} | "
        f"{case['added_rss_bytes'] / MIB:.0f} | {yes(case['added_within_bound'])} | {case['repeats']} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint (default %(default)s)")
    parser.add_argument("--shards", type=int, default=4, help="its files (default %(default)s)")
    parser.add_argument("--budget-mib", type=int, default=512, help="memory beyond the model (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each case (default %(default)s)")
    parser.add_argument("--slow-repeats", type=int, default=3, help="the same for ranges from moto")
    parser.add_argument("--runai", type=Path, help="folder with runai-model-streamer, made by `pip install --target`")
    parser.add_argument("--out", type=Path, help="where to write all figures as JSON")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        print(json.dumps(load_once(options.reader, options.place, options.budget_mib * MIB)))
        return 0
    figures = measure(options)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    ours = [case for case in figures["cases"] if case["reader"] == "day0"]
    for figure in ("peak", "added"):
        over = [case["source"] for case in ours if not case.get(f"{figure}_within_bound", False)]
        print(f"day0, {figure}: {'over the bound from ' + '; '.join(over) if over else 'within the bound'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
