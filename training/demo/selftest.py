"""Checks the training step on the GPU in half a minute: against upstream, graph against eager, and its speed.

It knows no data: ids and pictures are random.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from training.demo.evaluate import pixel_values
from training.demo.forward import Inputs, TrainingForward
from training.demo.model import Sizes, build_config, build_model
from training.demo.optimiser import FlatParameters
from training.demo.schedule import Bucket, bucket
from training.demo.step import Trainer

TASKS = 30
TIMED_STEPS = 5


def say(text: str) -> None:
    """A line, at once."""
    print(f"[selftest] {text}", flush=True)


def random_inputs(shape: Bucket, vocabulary: int, device: torch.device, seed: int) -> Inputs:
    """Random ids below `vocabulary`, a tenth of them answers; each row's pictures at its start."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.rows, shape.length)
    ids = torch.randint(0, vocabulary, size, generator=generator, dtype=torch.int32)
    task = torch.randint(0, TASKS, size, generator=generator)
    task = torch.where(torch.rand(size, generator=generator) < 0.1, task, -1).to(torch.int8)
    images = torch.randint(0, 256, (shape.images, 112, 112, 3), generator=generator, dtype=torch.uint8)
    each = max(1, shape.images // shape.rows)
    slots = torch.full((shape.images, 16), -1, dtype=torch.int32)
    for image in range(min(shape.images, shape.rows * min(each, shape.length // 20))):
        row, place = image % shape.rows, image // shape.rows
        slots[image] = row * shape.length + place * 18 + torch.arange(16, dtype=torch.int32)
    return Inputs(*(tensor.to(device) for tensor in (ids, task, images, slots)))


def against_upstream(model: Any, device: torch.device) -> None:
    """Largest difference of logits to upstream's forward, dense and by own choice, float32 and bfloat16."""
    torch.set_float32_matmul_precision("highest")
    config = model.config
    forward = TrainingForward(config)
    shape = Bucket(600, 2, 2)
    vocabulary = config.image_token_id - 12
    inputs = random_inputs(shape, vocabulary, device, 1)
    ids = inputs.ids.to(torch.int64).flatten()
    ids[inputs.image_slots.flatten().to(torch.int64)] = config.image_token_id
    ids = ids.view(shape.rows, shape.length)
    pixels, grid = pixel_values(inputs.images.cpu().numpy(), device)
    for dtype in (torch.float32, torch.bfloat16):
        parameters = FlatParameters(model, device, dtype)
        bias = torch.zeros(config.text_config.num_hidden_layers, config.text_config.n_routed_experts, device=device)
        upstream = model.to(device)
        upstream.set_experts_implementation("eager")
        with torch.no_grad():
            for name, parameter in upstream.named_parameters():
                if parameter.numel():
                    parameter.data = parameters.leaves[name].detach().clone()
            want = upstream(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, use_cache=False).logits.float()
            got = forward(parameters.leaves, bias, inputs, own_topk=True).logits.float()
        error = (want - got).abs()
        say(
            f"upstream {dtype}: logits differ by {error.max():.2e} at most, {error.mean():.2e} in the mean "
            f"(values {want.abs().mean():.2f}); "
            f"argmax equal at {(want.argmax(-1) == got.argmax(-1)).float().mean():.4f}"
        )
        model = upstream.float().cpu()


def graph_against_eager(config: Any, device: torch.device) -> None:
    """Losses of the same steps, eager and by graph: equal up to the order of sums and the noise's draw."""
    losses = []
    for graphs in (False, True):
        torch.manual_seed(3)
        trainer = new_trainer(config, device)
        trainer.use_graphs = graphs
        shape = bucket(512)
        fill(trainer.inputs_for(shape), random_inputs(shape, 1000, device, 5))
        series = []
        trainer.prepare([(shape, True)])
        for _ in range(4):
            trainer.take()
            trainer.step(shape, True, 1e-4)
            series.append(trainer.take())
        losses.append([values["loss"] / values["steps"] for values in series])
        trainer.release()
    say(f"loss eager {[round(x, 5) for x in losses[0]]}, by graph {[round(x, 5) for x in losses[1]]}")


def fill(static: Inputs, values: Inputs) -> None:
    """Copies values to static inputs."""
    for name in ("ids", "task", "images", "image_slots"):
        getattr(static, name).copy_(getattr(values, name))


def new_trainer(config: Any, device: torch.device) -> Trainer:
    """A trainer on first weights."""
    model = build_model(config, 0)
    low = torch.bfloat16 if device.type == "cuda" else torch.float32
    parameters = FlatParameters(model, device, low)
    bias = torch.zeros(config.text_config.num_hidden_layers, config.text_config.n_routed_experts, device=device)
    return Trainer(TrainingForward(config), parameters, bias, TASKS, say)


def speed(config: Any, device: torch.device) -> None:
    """Milliseconds and tokens a second of each bucket, by graph; and what took the time in the eager step."""
    torch.set_float32_matmul_precision("high")
    trainer = new_trainer(config, device)
    plan = [(bucket(n), own) for n, own in ((256, False), (512, False), (1024, False), (2048, True), (4096, True))]
    began = time.monotonic()
    trainer.prepare(plan)
    say(f"graphs took {time.monotonic() - began:.1f} s")
    for shape, own in plan:
        fill(trainer.inputs_for(shape), random_inputs(shape, 1000, device, shape.length))
        trainer.step(shape, own, 1e-4)
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(TIMED_STEPS):
            trainer.step(shape, own, 1e-4)
        torch.cuda.synchronize()
        each = (time.monotonic() - began) / TIMED_STEPS
        say(
            f"length {shape.length} own_topk {own}: {each * 1e3:.1f} ms a step, "
            f"{shape.rows * shape.length / each / 1e3:.0f}k tokens/s"
        )
    values = trainer.take()
    say(
        f"loss {values['loss'] / values['steps']:.4f} kl {values['kl'] / values['steps']:.4f} "
        f"skipped {values['skipped']}"
    )
    profile(trainer, device)
    trainer.release()


def profile(trainer: Trainer, device: torch.device) -> None:
    """The kernels that take longest in one eager step at 1,024 tokens."""
    shape = bucket(1024)
    inputs = trainer.inputs_for(shape)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        trainer.eager(inputs, False)
        torch.cuda.synchronize()
    print(
        profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70),
        flush=True,
    )


def selftest(tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """All checks; raises nothing for a difference, which is for a person to judge."""
    if tokenizer is None:
        from training.demo.tokenizer import build_tokenizer

        tokenizer = build_tokenizer()
    assert torch.cuda.is_available(), "the selftest needs a GPU"
    device = torch.device("cuda")
    torch.backends.cuda.enable_cudnn_sdp(False)
    config = build_config(tokenizer, Sizes())
    for check in (
        lambda: against_upstream(build_model(config, 0), device),
        lambda: graph_against_eager(config, device),
        lambda: speed(config, device),
    ):
        began = time.monotonic()
        try:
            check()
        except Exception as error:
            import traceback

            traceback.print_exc()
            say(f"FAILED: {error!r}")
        say(f"took {time.monotonic() - began:.1f} s")
