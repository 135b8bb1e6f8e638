"""Trains the demo model in a given time and scores it: `python -m training.demo.train --seconds 540 --out DIR`.

Whatever goes wrong on a lent machine ends in an export: a failed capture starts again without graphs, a diverged run
goes back to its last good weights, and a run that hangs leaves its intermediate export and a traceback.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
EVALUATION_SECONDS = 45.0
EXPORT_SECONDS = 10.0
REPORT_SECONDS = 10.0
SAVE_AT = (0.5, 0.85)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=540.0, help="of the whole command, from its start")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for weights, log and scores")
    parser.add_argument("--workers", type=int, default=13, help="processes that make batches")
    parser.add_argument("--init", type=Path, help="checkpoint folder, plain, packed or MXFP4, to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--smoke", action="store_true", help="every bucket within the time given")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-tf32", action="store_true", help="float32 products in full precision")
    parser.add_argument("--mini", action="store_true", help="a tiny model and tiny batches, for a CPU")
    parser.add_argument("--evaluation-seconds", type=float, default=EVALUATION_SECONDS)
    parser.add_argument("--selftest", action="store_true", help="compare and time on the GPU, then end")
    return parser.parse_args()


def prepare_examples(path: Path, seed: int, deadline: float) -> None:
    """In a process of its own: draws the evaluation's examples while the model trains."""
    from training.demo.evaluate import save_examples

    save_examples(path, seed, deadline)


class Run:
    """One training run; the parts that need torch are made in `start`, after the workers were forked."""

    def __init__(self, options: argparse.Namespace) -> None:
        from training.demo.progress import RunLog

        self.options = options
        self.log = RunLog(options.out / "log.jsonl", BEGAN)
        self.scratch = Path(tempfile.mkdtemp(prefix="demo-train-"))
        self.train_until = options.seconds - options.evaluation_seconds - EXPORT_SECONDS
        self.step = 0
        self.rate_factor = 1.0

    def schedule(self) -> Any:
        """The run's schedule, by its options."""
        from dataclasses import replace

        from training.demo import schedule

        make = schedule.smoke_run if self.options.smoke else schedule.first_run
        if self.options.init is not None and not self.options.smoke:
            make = schedule.continued_run
        plan = make(self.options.lr) if self.options.lr else make()
        if self.options.mini:
            plan = replace(plan, phases=((0.5, (256,)), (1.0, (512,))), tokens=1024, images={256: 8, 512: 8})
        return plan

    def start(self) -> None:
        """Forks the workers, then makes the model and the trainer."""
        from training.demo.batches import TASKS
        from training.demo.feed import Shape, start_workers

        options = self.options
        self.tasks = TASKS
        self.plan = self.schedule()
        self.fraction = 0.0
        self.asked = 0
        self.buckets = self.plan.all_buckets()
        shapes = [Shape(b.length, b.rows, b.images, self.plan.mixes.get(b.length)) for b in self.buckets]
        # Forked before any use of the driver.
        self.workers = start_workers(options.workers, shapes, seed=options.seed + 1)
        self.examples = self.scratch / "examples.pickle"
        self.examples_process = multiprocessing.get_context("fork").Process(
            target=prepare_examples, args=(self.examples, 7, BEGAN + self.train_until), daemon=True
        )
        self.examples_process.start()

        import torch

        from training.demo.forward import TrainingForward
        from training.demo.optimiser import FlatParameters
        from training.demo.pinned import PinnedFeed
        from training.demo.step import CaptureFailed, Trainer
        from training.demo.tokenizer import build_tokenizer

        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("highest" if options.no_tf32 else "high")
        torch.backends.cuda.enable_cudnn_sdp(False)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = build_tokenizer()
        model = self.first_model()
        self.config = model.config
        bias = torch.stack([layer.mlp.gate.e_score_correction_bias for layer in model.model.language_model.layers])
        parameters = FlatParameters(model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.trainer = Trainer(
            TrainingForward(self.config), parameters, bias.float().to(device), len(self.tasks), self.log.say
        )
        self.trainer.use_graphs &= not options.no_graph
        try:
            self.trainer.prepare(self.plan.combinations())
        except CaptureFailed:
            self.start_again_without_graphs()
        self.good = (parameters.master.clone(), self.trainer.router_bias.clone())
        self.feed = PinnedFeed(self.next_batch, self.buckets)
        count = sum(view.numel() for view in parameters.views.values())
        self.log.say(f"{count / 1e6:.2f}M parameters on {device}, torch {torch.__version__}; {options.workers} workers")

    def start_again_without_graphs(self) -> None:
        """Replaces the process by one that trains eagerly in the time that is left; a failed capture may leave the
        device's generators and streams unusable, and a run is not to be lost for its speed."""
        self.log.say("CUDA GRAPH CAPTURE FAILED; STARTING AGAIN WITHOUT GRAPHS\n" + traceback.format_exc())
        self.workers.close()
        self.examples_process.kill()
        left = f"{self.options.seconds - self.log.seconds():.0f}"
        again = [sys.executable, "-m", "training.demo.train", *sys.argv[1:], "--no-graph", "--seconds", left]
        os.execv(sys.executable, again)

    def next_batch(self) -> Any:
        """The oldest batch made; asks for one more, of the length that is due now."""
        due = self.plan.buckets(self.fraction)
        self.asked += 1
        return self.workers.take(self.buckets.index(due[self.asked % len(due)]))[1]

    def first_model(self) -> Any:
        """Upstream's model in float32: new, or read from the checkpoint to go on from."""
        import torch

        from training.demo.evaluate import load
        from training.demo.export import REST_NAME, unpack
        from training.demo.model import Sizes, build_config, build_model

        if self.options.init is None:
            sizes = mini_sizes() if self.options.mini else Sizes()
            return build_model(build_config(self.tokenizer, sizes), self.options.seed)
        folder = self.options.init
        if (folder / REST_NAME).is_file():
            folder = self.scratch / "init"
            unpack(self.options.init, folder)
        return load(folder, torch.float32, torch.device("cpu"))

    def loop(self) -> None:
        """Steps until the time for training is over."""
        log, trainer = self.log, self.trainer
        started, reported, saves = log.seconds(), log.seconds(), list(SAVE_AT)
        tokens = pictures = starved = 0
        while (now := log.seconds()) < self.train_until:
            fraction = (now - started) / (self.train_until - started)
            self.fraction = fraction
            slot = self.feed.get(timeout_seconds=1.0)
            if slot is None:
                starved += 1
                continue
            bucket = slot.bucket
            assert bucket is not None
            tokens += bucket.rows * bucket.length
            pictures += slot.pictures
            self.feed.upload(slot, trainer.inputs_for(bucket))
            rate = self.plan.rate(fraction, self.step) * self.rate_factor
            trainer.step(bucket, self.plan.own_topk(fraction), rate)
            self.step += 1
            if log.seconds() - reported > REPORT_SECONDS:
                self.report(tokens, pictures, log.seconds() - reported, rate, bucket, starved)
                reported, tokens, pictures, starved = log.seconds(), 0, 0, 0
            if saves and fraction > saves[0]:
                saves.pop(0)
                self.export()
        if tokens:
            self.report(tokens, pictures, max(0.1, log.seconds() - reported), 0.0, None, starved)

    def report(self, tokens: int, pictures: int, seconds: float, rate: float, bucket: Any, starved: int) -> None:
        """A progress line; also keeps good weights, and goes back to them when most steps were not finite."""
        from training.demo.progress import progress_line

        values = self.trainer.take()
        skipped_before = getattr(self, "skipped", 0.0)
        self.skipped = values["skipped"]
        line, document = progress_line(values, self.tasks, self.step, pictures, tokens, seconds)
        length = bucket.length if bucket else 0
        self.log.write({**document, "lr": rate, "length": length, "starved_seconds": starved})
        print(f"[{self.log.seconds():6.1f}s] lr {rate:.5f} length {length} {line}", flush=True)
        parameters = self.trainer.parameters
        if self.skipped - skipped_before > values["steps"] / 2:
            self.log.say("MOST STEPS WERE NOT FINITE: back to the last good weights at half the learning rate")
            self.rate_factor /= 2
            parameters.master.copy_(self.good[0])
            self.trainer.router_bias.copy_(self.good[1])
            parameters.refresh()
        elif self.skipped == skipped_before:
            self.good[0].copy_(parameters.master)
            self.good[1].copy_(self.trainer.router_bias)

    def export(self) -> Path:
        """Writes the weights as they are to the output folder, packed, and returns the plain folder."""
        from training.demo.export import pack, write_checkpoint

        plain = self.scratch / "checkpoint"
        shutil.rmtree(plain, ignore_errors=True)
        weights = self.trainer.parameters.views
        write_checkpoint(plain, self.config, self.tokenizer, weights, self.trainer.router_bias)
        pack(plain, self.options.out)
        self.log.say(f"exported after {self.step} steps")
        return plain

    def evaluate(self, folder: Path) -> None:
        """Scores the exported checkpoint with upstream's forward, in what time is left."""
        import torch

        from training.demo.evaluate import evaluate_folder, table

        # The judge is upstream's forward as users run it: float32 products stay float32.
        torch.set_float32_matmul_precision("highest")
        self.examples_process.join(timeout=5)
        deadline = BEGAN + self.options.seconds - 3.0
        scores = evaluate_folder(folder, self.examples, deadline)
        (self.options.out / "scores.txt").write_text(table(scores))
        self.log.write({"scores": scores})
        print(table(scores), flush=True)


def mini_sizes() -> Any:
    """A model small enough to train on a CPU core."""
    from training.demo.model import Sizes

    return Sizes(
        layers=("K", "D"),
        hidden=64,
        head_dim=16,
        lora_rank=32,
        delta_head_dim=16,
        experts=8,
        experts_per_token=2,
        expert_inner=32,
        index_dim=16,
        index_topk=32,
        vision_layers=1,
        vision_hidden=64,
        vision_inner=64,
        merger_inner=64,
        context_tokens=1024,
    )


def main() -> None:
    """The command; its exit status is 1 when training ended early, and the export is there all the same."""
    options = parse()
    if options.selftest:
        from training.demo.selftest import selftest

        selftest()
        return
    faulthandler.dump_traceback_later(options.seconds + 15, exit=True)
    run = Run(options)
    failed = False
    run.start()
    try:
        run.loop()
    except BaseException:
        failed = True
        run.log.say("TRAINING ENDED EARLY:\n" + traceback.format_exc())
    run.feed.stop()
    run.workers.close()
    folder = run.export()
    run.trainer.release()
    try:
        run.evaluate(folder)
    except Exception:
        failed = True
        run.log.say("EVALUATION FAILED:\n" + traceback.format_exc())
    run.log.say("done")
    shutil.rmtree(run.scratch, ignore_errors=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
