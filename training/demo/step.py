"""One training step per bucket, eager or as a CUDA graph from forward to optimiser; it knows no data."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.demo.forward import Inputs, TrainingForward
from training.demo.losses import task_losses
from training.demo.optimiser import FlatParameters, Optimiser, balance
from training.demo.schedule import Bucket

PIXEL_NOISE = 0.05
BALANCE_RATE = 1e-3
KL_WEIGHT = 1.0


class CaptureFailed(RuntimeError):
    """The step could not be captured as a CUDA graph."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums on the device since the last `take`: float32 `[tasks]` each, and scalars over steps."""

    nats: Tensor
    tokens: Tensor
    right: Tensor
    loss: Tensor
    kl: Tensor
    steps: Tensor


class Trainer:
    """The model's state and the step that changes it. `trace` is called with one line for anything worth a log."""

    def __init__(
        self, forward: TrainingForward, parameters: FlatParameters, router_bias: Tensor, tasks: int, trace: Any
    ) -> None:
        self.forward = forward
        self.parameters = parameters
        self.optimiser = Optimiser(parameters)
        self.router_bias = router_bias
        self.tasks = tasks
        self.trace = trace
        device = router_bias.device
        per_task = [torch.zeros(tasks, device=device) for _ in range(3)]
        self.totals = Totals(*per_task, *(torch.zeros((), device=device) for _ in range(3)))
        self.graphs: dict[tuple[Bucket, bool], torch.cuda.CUDAGraph] = {}
        self.inputs: dict[Bucket, Inputs] = {}
        self.use_graphs = device.type == "cuda"

    def inputs_for(self, bucket: Bucket) -> Inputs:
        """The bucket's static inputs on the device, to be written before a step."""
        if bucket not in self.inputs:
            device = self.router_bias.device
            shape = (bucket.rows, bucket.length)
            self.inputs[bucket] = Inputs(
                torch.zeros(shape, dtype=torch.int32, device=device),
                torch.full(shape, -1, dtype=torch.int8, device=device),
                torch.zeros(bucket.images, 112, 112, 3, dtype=torch.uint8, device=device),
                torch.full((bucket.images, 16), -1, dtype=torch.int32, device=device),
            )
        return self.inputs[bucket]

    def gradients(self, inputs: Inputs, own_topk: bool) -> dict[str, Tensor | None]:
        """Gradients by name of one batch; adds to the totals and moves the router's bias."""
        out = self.forward(
            self.parameters.leaves,
            self.router_bias,
            inputs,
            own_topk=own_topk,
            with_kl=True,
            pixel_noise=PIXEL_NOISE,
        )
        losses = task_losses(out.logits, inputs.ids, inputs.task, self.tasks)
        loss = losses.loss + KL_WEIGHT * out.kl
        names = list(self.parameters.leaves)
        grads = torch.autograd.grad(loss, [self.parameters.leaves[name] for name in names], allow_unused=True)
        with torch.no_grad():
            balance(self.router_bias, out.counts, BALANCE_RATE)
            totals = self.totals
            for total, value in (
                (totals.nats, losses.nats),
                (totals.tokens, losses.tokens),
                (totals.right, losses.right),
                (totals.loss, losses.loss.detach()),
                (totals.kl, out.kl.detach()),
            ):
                total.add_(value)
            totals.steps.add_(1.0)
        return dict(zip(names, grads, strict=True))

    def eager(self, inputs: Inputs, own_topk: bool) -> None:
        """One step, launched operation by operation."""
        self.optimiser.step(self.gradients(inputs, own_topk))

    def prepare(self, plan: Sequence[tuple[Bucket, bool]]) -> None:
        """Captures a graph for each bucket and kind of attention, before the first real step; nothing is learnt.

        Every step runs once eagerly first, so that libraries have set themselves up and memory's peak is one
        step's, not a step's beside the graphs'. Raises CaptureFailed; the process should not go on with the device
        then, for generators and streams may be left in the middle of a capture.
        """
        if not self.use_graphs:
            return
        bias = self.router_bias.clone()
        self.optimiser.lr.fill_(0.0)
        try:
            for bucket, own_topk in plan:
                self.eager_aside(self.inputs_for(bucket), own_topk)
            torch.cuda.synchronize()
            self.trace(f"eager peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
            torch.cuda.empty_cache()
            pool = torch.cuda.graph_pool_handle()
            for bucket, own_topk in plan:
                graph = torch.cuda.CUDAGraph()
                # The backward pass runs in a thread of its own and others may use the driver: only this one is policed.
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self.eager(self.inputs_for(bucket), own_topk)
                self.graphs[self.key(bucket, own_topk)] = graph
            torch.cuda.synchronize()
            self.trace(f"{len(self.graphs)} graphs; {torch.cuda.memory_reserved() / 2**30:.1f} GiB reserved")
        except Exception as error:
            raise CaptureFailed(f"no CUDA graphs of the step: {error!r}") from error
        self.router_bias.copy_(bias)
        self.optimiser.forget()
        self.take()

    def eager_aside(self, inputs: Inputs, own_topk: bool) -> None:
        """One eager step on a side stream, as a capture wants before it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.eager(inputs, own_topk)
        torch.cuda.current_stream().wait_stream(side)

    def key(self, bucket: Bucket, own_topk: bool) -> tuple[Bucket, bool]:
        """Which graph a step takes: short rows are dense either way."""
        return bucket, own_topk and bucket.length > self.forward.sizes.index_topk

    def step(self, bucket: Bucket, own_topk: bool, rate: float) -> None:
        """One step on the bucket's inputs, by its graph where there is one."""
        self.optimiser.lr.fill_(rate)
        graph = self.graphs.get(self.key(bucket, own_topk))
        if graph is not None:
            graph.replay()
        else:
            self.eager(self.inputs_for(bucket), own_topk)

    def take(self) -> dict[str, Any]:
        """The totals as numbers, set back to zero; waits for the device."""
        values: dict[str, Any] = {}
        for name in ("nats", "tokens", "right", "loss", "kl", "steps"):
            tensor = getattr(self.totals, name)
            values[name] = tensor.tolist()
            tensor.zero_()
        values["norm"] = self.optimiser.norm.item()
        values["skipped"] = self.optimiser.skipped.item()
        return values

    def release(self) -> None:
        """Gives graphs, inputs and the optimiser's state back to the device; no step can follow."""
        self.graphs.clear()
        self.inputs.clear()
        self.optimiser.adamw.state.clear()
        gc.collect()
        if self.router_bias.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
