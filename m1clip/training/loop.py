"""One training run, top to bottom: lay it on the machine, step until done, keep what was learned.

What a person sees goes through `Screen`; what lasts goes through `Run`.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from m1clip import __version__, devices, sensors
from m1clip.config import TrainConfig, to_json
from m1clip.console import Screen
from m1clip.data.batches import Augment, Batch, Batches, growing
from m1clip.data.splits import Side
from m1clip.data.token_cache import tell
from m1clip.evals.retrieval import Retrieval
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run, write_whole
from m1clip.shapes import VisionConfig
from m1clip.training import checkpoint, device_plan, features, init, memory, recipes, trackers
from m1clip.training.checkpoint import Progress
from m1clip.training.checkpoint_manager import Keeper
from m1clip.training.device_plan import Placed
from m1clip.training.logger import Watch
from m1clip.training.metrics import Meter
from m1clip.training.optim import rate
from m1clip.training.schedule import Pace
from m1clip.training.scored import Scored
from m1clip.training.setup import Setup, captions
from m1clip.training.signals import Stop
from m1clip.training.state import Learner

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


def train(setup: Setup, run: Run, screen: Screen) -> Result:
    """Start the run, or go on from its last whole checkpoint if it has one."""
    config = setup.config
    learner, placed, batches, held_out, last = ready(setup, screen)
    progress = checkpoint.load(setup.start, learner) if setup.start else Progress()
    introduce(run, learner, setup, progress, screen, len(batches.features.views))
    meter, keeper = Meter(config, learner.device), Keeper(run, learner, progress, screen.warn)
    pace = paced(setup, progress)
    watch, scores = Watch(run, screen, learner, progress, batches, pace), None
    meter.recall(row for row in run.records("step") if row["step"] > batches.epoch_start(progress.step))
    divided = divide(learner, progress, last, watch)
    placed = arrange(run, placed, learner, last, screen)
    told = facts(run, setup, placed, learner, progress, divided)
    screen.start(told, meter.chance, 1 / len(setup.data.held_out))

    tracker = trackers.mirrored(run, config, progress.step, screen.warn)
    with Stop(screen.say) as stop, tracker, screen.training(progress.step, setup.total):
        ending = is_over(config, pace, keeper, progress)
        end = progress.step if ending else pace.last_step()
        for batch in meter.timed(batches.stream(progress.step, end)):
            lr = learner.set_rate(rate(*pace.place(progress.step), config))
            here = learner.take(batch)
            meter.mark("copy")
            stats, *embeddings = memory.careful_step(learner, here, meter.mark, watch.divided)
            progress.step += 1
            meter.add(progress.step, lr, stats, batch, learner.chunk)
            epoch, ending = batches.ended_epoch(progress.step), pace.count(progress.step)
            progress.ended_by = config.budget_s if ending else None
            looking, saving, stopping = progress.step % config.watch_every == 0, keeper.due(epoch), stop.asked
            if looking or saving or epoch or stopping or ending or progress.step % config.log_every == 0:
                watch.steps(meter.read())
            if looking:
                watch.inside(here, *embeddings)
            if epoch or ending or pace.must_try:
                scores = None
                if ending or (pace.may_evaluate() and (not epoch or epoch % config.eval_every == 0)):
                    with meter.paused(), pace.aside("evaluating"):
                        scores = held_out.evaluate(learner, watch)
                    keeper.judge(scores)
            if epoch:
                watch.epoch(epoch, meter.epoch(), scores)
                watch.bad_rows(batches.pairs.met())
            if saving or keeper.has_new_best:
                with meter.paused(), pace.aside("saving"):
                    keeper.save()
            if ending or stopping or keeper.out_of_patience:
                break
        finished = ending or keeper.out_of_patience
        keeper.finish(finished)
    if keeper.out_of_patience:
        watch.gave_up()

    if finished and config.wise_ft < 1:
        scores = held_out.halfway(run, learner, progress.step)
    elif finished and (scores is None or keeper.restored):
        scores = held_out.evaluate(learner)
    watch.status("finished" if finished else "stopped")
    return Result(finished, progress.step, progress.seconds, scores, progress.best_step)


def is_over(config: TrainConfig, pace: Pace, keeper: Keeper, progress: Progress) -> bool:
    """Whether no step is to be taken, as all were before, or the time was; a run needs one at least."""
    if keeper.out_of_patience or progress.step == pace.last_step() or progress.has_ended(config.budget_s):
        return True
    if pace.is_late and not progress.step:
        raise ValueError(f"the {config.budget} of --budget were over before a step could be taken")
    return pace.is_late


def paced(setup: Setup, progress: Progress) -> Pace:
    """From nothing, all the time is used; what is learned already is spoilt by more than it needs."""
    config = setup.config
    most = None if config.recipe == "scratch" else setup.total
    evaluations = 2 if config.patience or config.wise_ft < 1 else 1  # the kept model's, where it is another
    return Pace(setup.total, setup.deadline, config.budget_s or 0.0, most, progress.seconds, evaluations)


def ready(setup: Setup, screen: Screen) -> tuple[Learner, Placed, Batches, Scored, Batch]:
    """The model where it will learn, what it learns from and is scored on, and the last batch."""
    config = setup.config
    torch.manual_seed(config.seed)
    model = init.begin(config, setup.origin, setup.tokenizer)
    recipes.prepare(model, config, setup.locked)
    batches, held_out = prepare(config, setup), Scored(setup.data.held_out)
    if setup.locked:
        batches, held_out = encode_once(config, setup, model, batches, screen)
    last = batches.at(setup.total - 1)  # its pictures are the largest
    placed = device_plan.settle(config, model, last, setup.total, setup.before, screen)
    devices.prepare(placed.plan)
    memory.keep_memory()
    if setup.origin and not setup.start:
        recipes.meet(model, setup.origin, batches)
    learner = Learner(model, config, replace(placed.plan, compile=False))
    return learner, placed, batches, held_out, last


def introduce(
    run: Run, learner: Learner, setup: Setup, progress: Progress, screen: Screen, views: int
) -> None:
    """What the run is. Written once the checkpoint, if any, is known to fit."""
    config, size = setup.config, learner.size
    write_whole(run.path / "config.json", to_json(config))  # first: from here on the run can be resumed
    if setup.origin and not setup.start and not (run.path / "start").is_dir():
        learner.model.save(run.path / "start")
    run.write("data.json", {**setup.data.record(), "views": views})
    run.rewind(progress.step)
    for path, what in setup.damaged.items():
        checkpoint.set_aside(path)
        run.log("event", progress.step, event="damaged checkpoint", checkpoint=path.name, reason=what)
        screen.warn(f"{path} is damaged ({what}); going on from {setup.start} instead")
    if setup.origin.told:
        screen.warn(f"{config.init}: {setup.origin.told}")
    skipped = setup.data.skipped
    if skipped:
        screen.warn(f"{skipped}; m1clip data check names them")
    counts = {
        "skipped_rows": len(skipped),
        "of_rows": skipped.rows,
        "parameters": size[0],
        "learning": size[1],
    }
    run.log("event", progress.step, event="resume" if progress.step else "start", **counts)
    if setup.why:
        run.log("event", progress.step, event="recipe", recipe=config.recipe, reason=setup.why)
    best = {"best_by": config.best_by, "best_score": progress.best_score}
    run.status("running", progress.step, total=setup.total, **best)


def prepare(config: TrainConfig, setup: Setup) -> Batches:
    vision, words, length = config.model.vision, setup.tokenizer, config.model.text.length
    cut, padded = partial(words.cut, length=length), partial(words.padded, length=length)
    return Batches(
        setup.data.train,
        partial(words, length=length),
        config.batch,
        config.seed,
        vision.image_size,
        Augment(config.crop, config.flip, config.colour),
        mask_twins=not config.count_twins,
        sides=growing(config.start_size, vision) if isinstance(vision, VisionConfig) else (),
        total=setup.total,
        captions=min(config.captions, most_captions(setup.data.train)),
        told=None if "text" in setup.locked else tell(setup.data.train, cut, padded),
    )


def divide(learner: Learner, progress: Progress, last: Batch, watch: Watch) -> str:
    """Decide how many pairs are in memory at once; the reason. A resumed run keeps what it had chosen."""
    watch.pair_bytes = memory.kept_bytes(learner, last)
    wish = learner.config.chunk
    if progress.chunk and (wish == "auto" or wish >= progress.chunk):
        learner.chunk, why = progress.chunk, "as it was before"
    else:
        learner.chunk, why = memory.choose_chunk(learner, last, watch.pair_bytes)
    progress.chunk = learner.chunk
    watch.run.log("event", progress.step, event="chunk", chunk=learner.chunk, reason=why)
    return why


def arrange(run: Run, placed: Placed, learner: Learner, last: Batch, screen: Screen) -> Placed:
    """Compile, if that is the plan and can be done; then write where the run is trained and why there."""
    placed = device_plan.compiled(placed, learner, last, screen)
    machine = {
        **sensors.machine(),
        "torch": torch.__version__,
        **placed.record(),
        "cpu_threads": placed.plan.threads or devices.THREADS,
        "m1clip": __version__,
    }
    if placed.why == device_plan.AS_BEFORE:  # the reason is the first one's
        with suppress(OSError, ValueError, KeyError):
            machine["why"] = run.read("machine.json")["why"]
    run.write("machine.json", machine)
    return placed


def most_captions(pairs: Side) -> int:
    """Of one picture, by the first thousand."""
    return max(len(pairs.captions(row)) for row in range(min(1000, len(pairs))))


def encode_once(
    config: TrainConfig, setup: Setup, model: CLIP, batches: Batches, screen: Screen
) -> tuple[Batches, Scored]:
    """Both sides through the locked towers, which are then done with."""
    device_plan.for_encoding(config, model, batches, screen)
    bars, data = screen.working, setup.data
    held_out = features.encoded(model, data.held_out, config, setup.locked, 1, bars)
    until = None  # a resumed run keeps its views
    if setup.deadline is not None and not setup.views:
        until = setup.deadline - HEADS * (config.budget_s or 0.0)
    views = setup.views or config.views
    learned = features.encoded(model, data.train, config, setup.locked, views, bars, until)
    if until is not None and 0 < len(learned.views) < config.views:
        screen.say(f"{len(learned.views)} of {config.views} views: there is no time for more")
    return replace(batches, features=learned), Scored(data.held_out, held_out)


def facts(
    run: Run, setup: Setup, placed: Placed, learner: Learner, progress: Progress, divided: str
) -> dict[str, str]:
    """What a person wants to know before it starts."""
    vision, config, data = learner.model.config.vision, learner.config, setup.data
    millions, learning = (number / 1e6 for number in learner.size)
    part = f", {learning:.2f} M of them learn" if learning < millions else ""
    at = f"at step {progress.step:,}, " if progress.step else ""
    lasting = f"until {config.budget} are over" if setup.deadline else f"{setup.total:,} steps"
    lasting += f", {setup.total:,} steps at most" if setup.deadline and config.recipe != "scratch" else ""
    chunks = "" if learner.chunk >= config.batch else f", {learner.chunk:,} at once"
    return {
        "run": f"{run.path}, {at}{lasting}",
        "device": f"{placed.plan}: {placed.why}; {placed.plan.threads or devices.THREADS} CPU threads",
        **({"checked": placed.parity} if placed.parity else {}),
        **(
            {"recipe": f"{config.recipe}: {setup.why}" if setup.why else config.recipe}
            if setup.origin or setup.why
            else {}
        ),
        "model": f"{millions:.2f} M parameters{part}; pictures of {vision.image_size} px",
        "data": f"{config.data}: {len(data.train):,} pictures to learn from, {len(data.held_out):,} held out",
        **data.facts,
        "captions": reading(setup.tokenizer, data.train, config.model.text.length),
        "batch": f"{config.batch:,} pairs{chunks} ({divided})",
    }


def reading(tokenizer: Tokenizer, pairs: Side, length: int) -> str:
    """How long captions are in tokens, from the first thousand, and whether the model sees all of them."""
    lengths = tokenizer.lengths(list(islice(captions(pairs), 1000)))
    cut = sum(one > length for one in lengths) / len(lengths)
    words = f"{len(tokenizer):,} kinds of token, up to {max(lengths)} a caption"
    return words + (f"; the model reads {length}, so {cut:.0%} are cut short" if cut else "")
