"""One training run, top to bottom: lay it on the machine, step until done, keep what was learned.

What a person sees goes through `Console`; what lasts goes through `Run`.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from m1clip import __version__, devices, sensors
from m1clip.config import TrainConfig, to_json
from m1clip.console import Console
from m1clip.data.batches import Augmentation, Batch, BatchStream
from m1clip.data.splits import Split
from m1clip.data.token_cache import tell
from m1clip.evals.retrieval import Retrieval
from m1clip.files import atomic_write
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run
from m1clip.training import checkpoint, device_plan, features, init, memory, recipes, trackers
from m1clip.training.checkpoint import Progress
from m1clip.training.checkpoint_manager import CheckpointManager
from m1clip.training.device_plan import PlanChoice
from m1clip.training.logger import Logger
from m1clip.training.metrics import StepMetrics
from m1clip.training.optim import rate
from m1clip.training.schedule import Schedule
from m1clip.training.scored import Scored
from m1clip.training.setup import Setup, captions
from m1clip.training.signals import Stop
from m1clip.training.state import TrainState

HEADS = 0.1  # of a budget, kept for the heads that learn from what locked towers have encoded


@dataclass(frozen=True)
class Result:
    finished: bool
    step: int
    seconds: float
    scores: Retrieval | None
    best_step: int | None

    def record(self) -> dict[str, Any]:
        """Flat, for a line of JSON."""
        scores = self.scores.record() if self.scores else {}
        done = {"finished": self.finished, "step": self.step, "seconds": round(self.seconds, 2)}
        return {**done, "best_step": self.best_step, **scores}


def train(setup: Setup, run: Run, console: Console) -> Result:
    """Start the run, or go on from its last whole checkpoint if it has one."""
    config = setup.config
    state, choice, batches, val, last = ready(setup, console)
    progress = checkpoint.load(setup.start, state) if setup.start else Progress()
    introduce(run, state, setup, progress, console, len(batches.features.views))
    metrics, checkpoints = (
        StepMetrics(config, state.device),
        CheckpointManager(run, state, progress, console.warn),
    )
    schedule = paced(setup, progress)
    logger, scores = Logger(run, console, state, progress, batches, schedule), None
    metrics.recall(row for row in run.records("step") if row["step"] > batches.epoch_start(progress.step))
    divided = divide(state, progress, last, logger)
    choice = arrange(run, choice, state, last, console)
    told = facts(run, setup, choice, state, progress, divided)
    console.start(told, metrics.chance, 1 / len(setup.data.val))

    tracker = trackers.mirrored(run, config, progress.step, console.warn)
    with Stop(console.say) as stop, tracker, console.training(progress.step, setup.total):
        ending = is_over(config, schedule, checkpoints, progress)
        end = progress.step if ending else schedule.last_step()
        for batch in metrics.timed(batches.stream(progress.step, end)):
            lr = state.set_rate(rate(*schedule.place(progress.step), config))
            here = state.take(batch)
            metrics.mark("copy")
            stats, *embeddings = memory.careful_step(state, here, metrics.mark, logger.divided)
            progress.step += 1
            metrics.add(progress.step, lr, stats, batch, state.chunk)
            epoch, ending = batches.ended_epoch(progress.step), schedule.count(progress.step)
            progress.ended_by = config.budget_s if ending else None
            looking, saving, stopping = (
                progress.step % config.inspect_every == 0,
                checkpoints.due(epoch),
                stop.asked,
            )
            if looking or saving or epoch or stopping or ending or progress.step % config.log_every == 0:
                logger.steps(metrics.read())
            if looking:
                logger.inside(here, *embeddings)
            if epoch or ending or schedule.must_try:
                scores = None
                if ending or (schedule.may_evaluate() and (not epoch or epoch % config.eval_every == 0)):
                    with metrics.paused(), schedule.aside("evaluating"):
                        scores = val.evaluate(state, logger)
                    checkpoints.judge(scores)
            if epoch:
                logger.epoch(epoch, metrics.epoch(), scores)
                logger.bad_rows(batches.pairs.met())
            if saving or checkpoints.has_new_best:
                with metrics.paused(), schedule.aside("saving"):
                    checkpoints.save()
            if ending or stopping or checkpoints.out_of_patience:
                break
        finished = ending or checkpoints.out_of_patience
        checkpoints.finish(finished)
    if checkpoints.out_of_patience:
        logger.gave_up()

    if finished and config.wise_ft < 1:
        scores = val.halfway(run, state, progress.step)
    elif finished and (scores is None or checkpoints.restored):
        scores = val.evaluate(state)
    logger.status("finished" if finished else "stopped")
    return Result(finished, progress.step, progress.seconds, scores, progress.best_step)


def is_over(
    config: TrainConfig, schedule: Schedule, checkpoints: CheckpointManager, progress: Progress
) -> bool:
    """Whether no step is to be taken, as all were before, or the time was; a run needs one at least."""
    if (
        checkpoints.out_of_patience
        or progress.step == schedule.last_step()
        or progress.has_ended(config.budget_s)
    ):
        return True
    if schedule.is_late and not progress.step:
        raise ValueError(f"the {config.budget} of --budget were over before a step could be taken")
    return schedule.is_late


def paced(setup: Setup, progress: Progress) -> Schedule:
    """From nothing, all the time is used; what is learned already is spoilt by more than it needs."""
    config = setup.config
    most = None if config.recipe == "scratch" else setup.total
    evaluations = 2 if config.patience or config.wise_ft < 1 else 1  # the kept model's, where it is another
    return Schedule(setup.total, setup.deadline, config.budget_s or 0.0, most, progress.seconds, evaluations)


def ready(setup: Setup, console: Console) -> tuple[TrainState, PlanChoice, BatchStream, Scored, Batch]:
    """The model where it will learn, what it learns from and is scored on, and the last batch."""
    config = setup.config
    torch.manual_seed(config.seed)
    model = init.begin(config, setup.init, setup.tokenizer)
    recipes.prepare(model, config, setup.locked)
    batches, val = prepare(config, setup), Scored(setup.data.val)
    if setup.locked:
        batches, val = encode_once(config, setup, model, batches, console)
    last = batches.at(setup.total - 1)  # its images are the largest
    choice = device_plan.settle(config, model, last, setup.total, setup.before, console)
    devices.apply_plan(choice.plan)
    memory.retain_freed_memory()
    if setup.init and not setup.start:
        recipes.meet(model, setup.init, batches)
    state = TrainState(model, config, replace(choice.plan, compile=False))
    return state, choice, batches, val, last


def introduce(
    run: Run, state: TrainState, setup: Setup, progress: Progress, console: Console, views: int
) -> None:
    """What the run is. Written once the checkpoint, if any, is known to fit."""
    config, size = setup.config, state.size
    atomic_write(run.path / "config.json", to_json(config))  # first: from here on the run can be resumed
    if setup.init and not setup.start and not (run.path / "start").is_dir():
        state.model.save(run.path / "start")
    run.write("data.json", {**setup.data.record(), "views": views})
    run.rewind(progress.step)
    for path, what in setup.damaged.items():
        checkpoint.set_aside(path)
        run.log("event", progress.step, event="damaged checkpoint", checkpoint=path.name, reason=what)
        console.warn(f"{path} is damaged ({what}); going on from {setup.start} instead")
    if setup.init.told:
        console.warn(f"{config.init}: {setup.init.told}")
    skipped = setup.data.skipped
    if skipped:
        console.warn(f"{skipped}; m1clip data check names them")
    counts = {
        "skipped_rows": len(skipped),
        "of_rows": skipped.rows,
        "parameters": size[0],
        "learning": size[1],
    }
    run.log("event", progress.step, event="resume" if progress.step else "start", **counts)
    if setup.why:
        run.log("event", progress.step, event="recipe", recipe=config.recipe, reason=setup.why)
    best = {"best_metric": config.best_metric, "best_score": progress.best_score}
    run.status("running", progress.step, total=setup.total, **best)


def prepare(config: TrainConfig, setup: Setup) -> BatchStream:
    vision, words, length = config.model.vision, setup.tokenizer, config.model.text.context_length
    cut, padded = partial(words.encode, length=length), partial(words.pad, length=length)
    return BatchStream(
        setup.data.train,
        partial(words, length=length),
        config.batch_size,
        config.seed,
        vision.image_size,
        Augmentation(config.crop_scale, config.hflip, config.color_jitter),
        mask_duplicates=True,
        total=setup.total,
        captions=min(config.captions_per_image, most_captions(setup.data.train)),
        told=None if "text" in setup.locked else tell(setup.data.train, cut, padded),
    )


def divide(state: TrainState, progress: Progress, last: Batch, logger: Logger) -> str:
    """Decide how many pairs are in memory at once; the reason. A resumed run keeps what it had chosen."""
    logger.pair_bytes = memory.kept_bytes(state, last)
    requested = state.config.chunk
    if progress.chunk and (requested == "auto" or requested >= progress.chunk):
        state.chunk, why = progress.chunk, "as it was before"
    else:
        state.chunk, why = memory.choose_chunk(state, last, logger.pair_bytes)
    progress.chunk = state.chunk
    logger.run.log("event", progress.step, event="chunk", chunk=state.chunk, reason=why)
    return why


def arrange(run: Run, choice: PlanChoice, state: TrainState, last: Batch, console: Console) -> PlanChoice:
    """Compile, if that is the plan and can be done; then write where the run is trained and why there."""
    choice = device_plan.compiled(choice, state, last, console)
    machine = {
        **sensors.machine(),
        "torch": torch.__version__,
        **choice.record(),
        "cpu_threads": choice.plan.threads or devices.DEFAULT_THREADS,
        "m1clip": __version__,
    }
    if choice.why == device_plan.AS_BEFORE:  # the reason is the first one's
        with suppress(OSError, ValueError, KeyError):
            machine["why"] = run.read("machine.json")["why"]
    run.write("machine.json", machine)
    return choice


def most_captions(pairs: Split) -> int:
    """Of one image, by the first thousand."""
    return max(len(pairs.captions(row)) for row in range(min(1000, len(pairs))))


def encode_once(
    config: TrainConfig, setup: Setup, model: CLIP, batches: BatchStream, console: Console
) -> tuple[BatchStream, Scored]:
    """Both sides through the locked towers, which are then done with."""
    device_plan.for_encoding(config, model, batches, console)
    bars, data = console.working, setup.data
    val = features.encoded(model, data.val, config, setup.locked, 1, bars)
    until = None  # a resumed run keeps its views
    if setup.deadline is not None and not setup.views:
        until = setup.deadline - HEADS * (config.budget_s or 0.0)
    views = setup.views or recipes.VIEWS
    learned = features.encoded(model, data.train, config, setup.locked, views, bars, until)
    if until is not None and 0 < len(learned.views) < recipes.VIEWS:
        console.say(f"{len(learned.views)} of {recipes.VIEWS} views: there is no time for more")
    return replace(batches, features=learned), Scored(data.val, val)


def facts(
    run: Run, setup: Setup, choice: PlanChoice, state: TrainState, progress: Progress, divided: str
) -> dict[str, str]:
    """What a person wants to know before it starts."""
    vision, config, data = state.model.config.vision, state.config, setup.data
    millions, learning = (number / 1e6 for number in state.size)
    part = f", {learning:.2f} M of them learn" if learning < millions else ""
    at = f"at step {progress.step:,}, " if progress.step else ""
    lasting = f"until {config.budget} are over" if setup.deadline else f"{setup.total:,} steps"
    lasting += f", {setup.total:,} steps at most" if setup.deadline and config.recipe != "scratch" else ""
    chunks = "" if state.chunk >= config.batch_size else f", {state.chunk:,} at once"
    return {
        "run": f"{run.path}, {at}{lasting}",
        "device": f"{choice.plan}: {choice.why}; {choice.plan.threads or devices.DEFAULT_THREADS} CPU threads",
        **({"checked": choice.parity} if choice.parity else {}),
        **(
            {"recipe": f"{config.recipe}: {setup.why}" if setup.why else config.recipe}
            if setup.init or setup.why
            else {}
        ),
        "model": f"{millions:.2f} M parameters{part}; images of {vision.image_size} px",
        "data": f"{config.data}: {len(data.train):,} images to learn from, {len(data.val):,} validation",
        **data.facts,
        "captions": reading(setup.tokenizer, data.train, config.model.text.context_length),
        "batch": f"{config.batch_size:,} pairs{chunks} ({divided})",
    }


def reading(tokenizer: Tokenizer, pairs: Split, length: int) -> str:
    """How long captions are in tokens, from the first thousand, and whether the model sees all of them."""
    lengths = tokenizer.lengths(list(islice(captions(pairs), 1000)))
    cut = sum(one > length for one in lengths) / len(lengths)
    words = f"{len(tokenizer):,} kinds of token, up to {max(lengths)} a caption"
    return words + (f"; the model reads {length}, so {cut:.0%} are cut short" if cut else "")
