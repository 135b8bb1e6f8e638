"""Puts the language service together and runs it from start to drained; knows no request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import transformers

from llm_svc.build import LoadError
from llm_svc.detokenizer import Detokenizer, spellings_of
from llm_svc.engine import Engine
from llm_svc.loading import LoadedModel, load_model
from llm_svc.observe import EngineObserver
from llm_svc.output import OutputChannel
from llm_svc.prompt import PromptBuilder
from llm_svc.request_limits import RequestLimits
from llm_svc.sampler import Sampler
from llm_svc.sampling_checks import GenerationDefaults, read_eos_ids
from llm_svc.server import LanguageServicer, Served
from llm_svc.settings import LlmSettings
from llm_svc.vision_replicas import VisionReplicas
from llm_svc.visual import VisualStore
from llm_svc.warm_up import warm_up
from llm_svc.wire import RequestReader
from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2, llm_pb2_grpc
from svc_common.checkpoint_errors import CheckpointError
from svc_common.checkpoint_source import CheckpointSource
from svc_common.daemon_thread import run_in_daemon_thread
from svc_common.health import Health, StepAge
from svc_common.logs import get_logger
from svc_common.metrics import EngineMetrics
from svc_common.server import GrpcServer
from svc_common.startup import Startup
from svc_common.store_errors import StoreError
from svc_common.versions import versions_of

SERVICE_NAME = llm_pb2.DESCRIPTOR.services_by_name["LanguageService"].full_name

_log = get_logger("day0.llm")


class LanguageModelService:
    """One language service. Alive from the start; ready when the weights are there and one forward has run."""

    def __init__(self, settings: LlmSettings) -> None:
        self._settings = settings
        self.startup = Startup()
        self.metrics = EngineMetrics()
        self.metrics.follow(self.startup)
        self.health = Health(settings.host, settings.health_port)
        self.server = GrpcServer(settings, self.health, name="llm")
        self.metrics_port = 0
        self._step_age = StepAge()
        self._prompts: PromptBuilder | None = None
        self._vision: VisionReplicas | None = None
        self.servicer = LanguageServicer(
            self.startup,
            max_open_requests=settings.max_open_requests,
            output_buffer_tokens=settings.output_buffer_tokens,
        )
        self.server.add(llm_pb2_grpc.add_LanguageServiceServicer_to_server, self.servicer, SERVICE_NAME)
        self.health.set_liveness(self._alive)
        self.metrics.engine_step_age_seconds.set_function(self._step_age.age_seconds)

    async def start(self) -> None:
        """Binds every port; OSError names the port setting that is taken. `load` comes next."""
        self.metrics_port = self.metrics.start_http(self._settings.host, self._settings.metrics_port)
        await self.server.start()

    async def load(self) -> None:
        """Loads the model, runs one forward and becomes ready; raises LoadError."""
        try:
            await self._load()
        except Exception:
            self.startup.fail()
            raise

    async def _load(self) -> None:
        source = await run_in_daemon_thread(
            lambda: open_source(self._settings, on_listed=lambda: self.startup.enter("manifest")), name="resolve"
        )
        try:
            await self._load_from(source)
        finally:
            await asyncio.to_thread(source.close)

    async def _load_from(self, source: CheckpointSource) -> None:
        settings = self._settings
        model = await run_in_daemon_thread(lambda: load_model(settings, source, self.startup.show_bytes), name="load")
        self.startup.enter("warm_up")
        await run_in_daemon_thread(lambda: warm_up(model), name="warm-up")
        self._prompts = await run_in_daemon_thread(
            lambda: PromptBuilder.from_checkpoint(source.folder, template_seconds=settings.template_seconds),
            name="tokenizer",
        )
        if model.facts.visual_hidden:
            self._vision = VisionReplicas(self._settings)
            await self._vision.start()
        self.servicer.served = self._serve(model, self._prompts, source)
        self.startup.enter("ready")
        self.health.set_serving(SERVICE_NAME, True)
        _log.info("ready", extra={"model": self.servicer.served.info.model, "tier": model.facts.tier})

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains; a failed load is raised."""
        try:
            await self.start()
            await self.server.run_until_signal(self._load_and_watch)
        finally:
            await self._close()

    async def _load_and_watch(self) -> None:
        """Loads, then waits for the engine: a process whose engine has died ends, so that it can be started anew."""
        await self.load()
        assert self.servicer.served is not None
        await asyncio.shield(asyncio.wrap_future(self.servicer.served.engine.ended))

    async def stop(self) -> None:
        """Drains, then closes everything."""
        await self.server.drain()
        await self._close()

    def _alive(self) -> bool:
        served = self.servicer.served
        engine_alive = served is None or served.engine.alive
        return engine_alive and self._step_age.alive(self._settings.liveness_seconds)

    def _serve(self, model: LoadedModel, prompts: PromptBuilder, source: CheckpointSource) -> Served:
        settings, path = self._settings, source.folder
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        spellings = spellings_of(tokenizer)
        end_token_ids = read_eos_ids(path)
        engine = Engine(
            runner=model.runner,
            scheduler=model.scheduler,
            sampler=Sampler(model.facts.vocab_size),
            make_detokenizer=lambda: Detokenizer(spellings),
            end_token_ids=end_token_ids,
            observer=EngineObserver(self.metrics, model.runner.expert_counts),
            step_age=self._step_age,
            wake=_waker(asyncio.get_running_loop()),
        )
        info = _model_info(settings, model, source)
        workspace = model.runner.workspace
        if workspace is not None:
            self.metrics.workspace_bytes.set_function(lambda: workspace.capacity_bytes)
            self.metrics.workspace_high_water_bytes.set_function(lambda: workspace.high_water_bytes)
        reader = RequestReader(
            _limits(settings),
            GenerationDefaults.from_checkpoint(path),
            prompts,
            eos_ids=end_token_ids,
            context_tokens=model.facts.context_tokens,
            vocab_size=model.facts.vocab_size,
            model=info.model,
        )
        visual = None
        if model.facts.visual_hidden:
            assert self._vision is not None
            visual = VisualStore(self._vision, hidden=model.facts.visual_hidden, on_rows=engine.nudge)
        engine.start()
        return Served(
            engine=engine,
            reader=reader,
            visual=visual,
            info=info,
            workspace=workspace,
            token_bytes=spellings.token_bytes,
            image_token_id=model.facts.image_token_id,
            max_running_sequences=model.scheduler.limits.max_running_sequences,
        )

    async def _close(self) -> None:
        self.startup.stop()
        if self.servicer.served is not None:
            await asyncio.to_thread(self.servicer.served.engine.stop)
        if self._vision is not None:
            await self._vision.stop()
        if self._prompts is not None:
            await asyncio.to_thread(self._prompts.close)
        if self.metrics_port:
            await asyncio.to_thread(self.metrics.stop_http)
            self.metrics_port = 0


def _waker(loop: asyncio.AbstractEventLoop) -> Callable[[Sequence[OutputChannel]], None]:
    """Wakes the readers of a step with one call into the event loop."""

    def wake_all(channels: Sequence[OutputChannel]) -> None:
        for channel in channels:
            channel.wake()

    def wake(channels: Sequence[OutputChannel]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake_all, channels)

    return wake


def _limits(settings: LlmSettings) -> RequestLimits:
    return RequestLimits(
        max_text_bytes=settings.max_prompt_bytes,
        max_images=settings.max_images,
        max_image_bytes=settings.max_total_image_bytes,
        max_tokens=settings.max_output_tokens,
        max_total_tokens=settings.max_total_output_tokens,
    )


def open_source(settings: LlmSettings, *, on_listed: Callable[[], object] = lambda: None) -> CheckpointSource:
    """The checkpoint that the settings name; raises LoadError. See CheckpointSource for `on_listed`."""
    try:
        return CheckpointSource(
            settings.model,
            require_manifest=settings.require_manifest,
            budget_bytes=settings.load_budget_bytes,
            on_listed=on_listed,
        )
    except (CheckpointError, StoreError) as error:
        raise LoadError(f"model: {error}") from error


def _model_info(settings: LlmSettings, model: LoadedModel, source: CheckpointSource) -> common_pb2.ModelInfo:
    facts = model.facts
    return common_pb2.ModelInfo(
        model=settings.model_name or source.name,
        architecture=facts.architecture,
        tier=facts.tier,
        modalities=["text", "image"] if facts.visual_hidden else ["text"],
        context_tokens=facts.context_tokens,
        dtype=facts.dtype,
        operator_backends=facts.operator_backends,
        checkpoint_digest=source.digest,
        versions=versions_of("day0", "torch", "transformers"),
        visual_hidden=facts.visual_hidden,
        experts_residency=facts.experts_residency,
        experts_convert_tokens=facts.experts_convert_tokens,
    )
