"""Builds a vision service from its settings and takes it from first port to ready to drained; answers no call."""

from __future__ import annotations

import asyncio
import platform
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import torch

from protos.common.v1 import common_pb2
from protos.vision.v1 import vision_pb2_grpc
from svc_common.checkpoint_errors import CheckpointError
from svc_common.checkpoint_source import CheckpointSource
from svc_common.health import Health, StepAge
from svc_common.logs import get_logger
from svc_common.metrics import VisionMetrics
from svc_common.server import GrpcServer
from svc_common.startup import Startup
from svc_common.store_errors import StoreError
from svc_common.threads import product_threads
from svc_common.versions import versions_of
from vision_svc.batcher import Batcher
from vision_svc.cache import TokenCache
from vision_svc.encoder import Encoder
from vision_svc.pipeline import Pipeline
from vision_svc.processor import PatchProcessor
from vision_svc.server import SERVICE_NAME, VisionServicer
from vision_svc.settings import VisionSettings
from vision_svc.weights import WeightsError

_log = get_logger("day0.vision")


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """What is left of a checkpoint once it was read; `name` is the last part of where it was."""

    encoder: Encoder
    processor: PatchProcessor
    name: str
    checkpoint_digest: str


class VisionLauncher:
    """One vision service. `start`, `load`, then `stop`; or `run`, which does all three and obeys signals."""

    def __init__(self, settings: VisionSettings) -> None:
        self.settings = settings
        self.startup = Startup()
        self.metrics = VisionMetrics()
        self.metrics.follow(self.startup)
        self.health = Health(settings.host, settings.health_port)
        self.server = GrpcServer(settings, self.health, name="vision")
        self.metrics_port = 0
        self.pipeline: Pipeline | None = None
        self._servicer = VisionServicer(self.metrics, self.startup)
        self._step_age = StepAge()
        self._encode_executor = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._batches: asyncio.Task[None] | None = None
        self.server.add(vision_pb2_grpc.add_VisionServiceServicer_to_server, self._servicer, SERVICE_NAME)

    async def start(self) -> None:
        """Opens the ports; calls other than GetModelInfo are UNAVAILABLE until `load` has ended."""
        self.metrics_port = self.metrics.start_http(self.settings.host, self.settings.metrics_port)
        await self.server.start()

    async def load(self) -> None:
        """Reads the weights, runs one real forward, only then is ready. Raises WeightsError, OSError, ValueError."""
        loop = asyncio.get_running_loop()
        try:
            model = await loop.run_in_executor(self._encode_executor, self._load_model)
            self.startup.enter("warm_up")
            await loop.run_in_executor(self._encode_executor, model.encoder.warm_up)
        except Exception:
            self.startup.fail()
            raise
        self._begin(model)
        self.startup.enter("ready")
        self.health.set_serving(SERVICE_NAME, True)
        _log.info("ready", extra={"model": self.settings.model, "weight_files": list(model.encoder.weight_files)})

    async def stop(self) -> None:
        """Ends a load that still reads, drains, and frees threads and ports. May be called twice."""
        self.startup.stop()
        await self.server.drain()
        if self._batches is not None:
            self._batches.cancel()
            await asyncio.gather(self._batches, return_exceptions=True)
        if self.pipeline is not None:
            self.pipeline.close()
        self._encode_executor.shutdown(wait=False, cancel_futures=True)
        if self.metrics_port:
            self.metrics.stop_http()
            self.metrics_port = 0

    async def run(self) -> None:
        """Serves until a signal; raises when loading failed."""
        try:
            await self.start()
            await self.server.run_until_signal(self.load)
        finally:
            await self.stop()

    def _load_model(self) -> _LoadedModel:
        """Opens the checkpoint, reads it and closes it, all in one thread, so that a cancelled load closes it too."""
        with closing(self._open_source()) as source:
            encoder, processor = self._build(source)
            return _LoadedModel(encoder, processor, source.name, source.digest)

    def _open_source(self) -> CheckpointSource:
        settings = self.settings
        try:
            return CheckpointSource(
                settings.model,
                require_manifest=settings.require_manifest,
                budget_bytes=settings.load_budget_bytes,
                on_listed=lambda: self.startup.enter("manifest"),
            )
        except (CheckpointError, StoreError) as error:
            raise WeightsError(f"model: {error}") from error

    def _build(self, source: CheckpointSource) -> tuple[Encoder, PatchProcessor]:
        settings = self.settings
        processor = PatchProcessor(source.folder)
        encoder = Encoder(
            source,
            dtype=settings.dtype,
            batch_invariant=settings.batch_invariant,
            progress=self.startup.show_bytes,
        )
        if threads := product_threads(settings.encode_threads, encoder.widest_weights):
            torch.set_num_threads(threads)
        for name in ("patch_size", "merge_size", "temporal_patch_size"):
            ours, towers = getattr(processor, name), getattr(encoder, name)
            if ours != towers:
                raise WeightsError(f"{name} is {ours} in preprocessor_config.json and {towers} in config.json")
        if processor.max_patches > settings.patch_budget:
            _log.warning(
                "images above the patch budget are refused; the checkpoint's processor allows larger ones",
                extra={"patch_budget": settings.patch_budget, "processor_max_patches": processor.max_patches},
            )
        return encoder, processor

    def _begin(self, model: _LoadedModel) -> None:
        settings, encoder = self.settings, model.encoder
        batcher = Batcher(
            encoder.encode,
            self._encode_executor,
            patch_budget=settings.patch_budget,
            max_waiting_patches=settings.max_waiting_patches,
            batch_wait_ms=settings.batch_wait_ms,
            step_age=self._step_age,
            observe_encode_seconds=self.metrics.encode_seconds.observe,
            observe_queue_seconds=self.metrics.request_queue_time_seconds.observe,
        )
        versions = versions_of("day0", "torch", "transformers", "pillow", "numpy")
        # Everything the last bit of a sum may depend on.
        machine = [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
        fingerprint = f"{sorted(versions.items())} {machine}".encode() + encoder.fingerprint
        self.pipeline = Pipeline(
            rules=settings.decode_rules,
            processor=model.processor,
            batcher=batcher,
            cache=TokenCache(settings.cache_bytes),
            fingerprint=fingerprint,
            decode_threads=settings.decode_threads,
            max_waiting_images=settings.max_waiting_images,
            max_waiting_bytes=settings.max_waiting_bytes,
        )
        batches = asyncio.create_task(batcher.run())
        batches.add_done_callback(self._batches_ended)
        self._batches = batches
        limit_seconds = settings.liveness_seconds
        self.health.set_liveness(lambda: not batches.done() and self._step_age.alive(limit_seconds))
        info = common_pb2.ModelInfo(
            model=settings.model_name or model.name,
            architecture=encoder.architecture,
            tier="upstream",
            modalities=["image"],
            dtype=encoder.dtype,
            operator_backends={"vision_attention": "torch_sdpa"},
            checkpoint_digest=model.checkpoint_digest,
            versions=versions,
            visual_hidden=encoder.hidden,
        )
        self._servicer.begin(self.pipeline, info, encoder.merge_size)

    def _batches_ended(self, batches: asyncio.Task[None]) -> None:
        if not batches.cancelled():
            _log.critical("the batch loop ended; liveness fails", exc_info=batches.exception())
            self.health.set_serving(SERVICE_NAME, False)
