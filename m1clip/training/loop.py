"""One training run: place the model, run the loop, keep the result."""

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from m1clip import __version__, devices, sensors
from m1clip.config import TrainConfig, to_json
from m1clip.console import Console
from m1clip.data.batches import Augmentation, Batch, BatchStream, FeatureTables, tokenize_captions
from m1clip.data.splits import Split
from m1clip.evals.evaluate import Evaluation, evaluate_model, split_relevance
from m1clip.evals.retrieval import Retrieval, chance_scores
from m1clip.files import atomic_write
from m1clip.model.clip import CLIP, load
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run
from m1clip.training import checkpoint, device_plan, memory
from m1clip.training.checkpoint import CheckpointManager, Progress
from m1clip.training.device_plan import PlanChoice
from m1clip.training.logger import Logger, StepMetrics
from m1clip.training.openmp import WaitPolicy
from m1clip.training.optim import Schedule, learning_rate
from m1clip.training.recipes import FEATURE_VIEWS, build_model, calibrate_heads, set_trainable
from m1clip.training.setup import Setup, sample_captions
from m1clip.training.state import TrainState

HEAD_TIME = 0.1  # of a budget, reserved for training heads on encoded features


@dataclass(frozen=True)
class TrainResult:
    run: Path
    finished: bool
    step: int
    seconds: float
    scores: Retrieval | None
    best_step: int | None
    restored: bool = False
    """The model is that of best_step, not of the last step (--patience)."""

    @property
    def model(self) -> Path:
        """The model folder, for m1clip.load."""
        return self.run / "model"

    def record(self) -> dict[str, Any]:
        """Flat, for a line of JSON."""
        scores = self.scores.record() if self.scores else {}
        result = {"finished": self.finished, "step": self.step, "seconds": round(self.seconds, 2)}
        return {"run": str(self.run), **result, "best_step": self.best_step, **scores}


@dataclass
class Session:
    """The parts of a run in one process."""

    run: Run
    console: Console
    state: TrainState
    progress: Progress
    batches: BatchStream
    schedule: Schedule
    metrics: StepMetrics
    logger: Logger
    checkpoints: CheckpointManager
    evaluate: Callable[[CLIP], Evaluation]
    wait_policy: WaitPolicy


def fit(setup: Setup, run: Run, console: Console) -> TrainResult:
    """Train from the start, or from the last intact checkpoint."""
    session = start_session(setup, run, console)
    state, progress, config = session.state, session.progress, setup.config
    tracker: AbstractContextManager[None] = nullcontext()
    if config.track != "none":
        from m1clip.training.trackers import tracking

        tracker = tracking(run, config, progress.step, console.warn)
    with StopSignal(console.print) as stop, tracker, console.training(progress.step, setup.total):
        completed, evaluation = training_loop(session, stop)
        session.wait_policy.close()
        session.checkpoints.finish(completed)
    if session.checkpoints.out_of_patience:
        session.logger.log_early_stop()
    if completed and config.wise_ft < 1:
        evaluation = session.evaluate(load(run.model).to_devices(*state.model.devices))
        scores = evaluation.scores.record()
        run.log("event", progress.step, event="wise-ft", weight=config.wise_ft, **scores)
    elif completed and (evaluation is None or session.checkpoints.restored):
        evaluation = evaluate_state(session)
    session.logger.write_status("finished" if completed else "stopped")
    final = evaluation.scores if completed and evaluation else None
    restored = session.checkpoints.restored
    return TrainResult(run.path, completed, progress.step, progress.seconds, final, progress.best_step, restored)


def training_loop(s: Session, stop: "StopSignal") -> tuple[bool, Evaluation | None]:
    """Train until the schedule ends or a signal arrives; whether it is complete, and the last evaluation."""
    state, config, progress = s.state, s.state.config, s.progress
    evaluation, ending = None, has_ended(s)
    last = progress.step if ending else s.schedule.last_step()
    for batch in s.metrics.timed(s.batches.stream(progress.step, last)):
        lr = learning_rate(*s.schedule.progress(progress.step), config.lr, config.warmup)
        state.set_lr(lr)
        batch = state.to_device(batch)
        s.metrics.mark("copy")
        stats, image_BE, text_BE = memory.step_with_retry(state, batch, s.metrics.mark, s.logger.log_out_of_memory)
        progress.step += 1
        s.metrics.add(progress.step, lr, stats, batch, state.chunk)

        epoch, ending = s.batches.epoch_end(progress.step), s.schedule.count(progress.step)
        progress.ended_budget_s = config.budget_s if ending else None
        inspecting, saving = progress.step % config.inspect_every == 0, s.checkpoints.is_due()
        stopping = stop.received
        if any((inspecting, saving, epoch, stopping, ending, progress.step % config.log_every == 0)):
            s.logger.log_steps(s.metrics.read())
            s.wait_policy.update()
        if inspecting:
            s.logger.log_diagnostics(batch, image_BE, text_BE)
        if epoch or ending:
            evaluation = None
        if ending or eval_is_due(s, epoch):
            with s.metrics.paused(), s.schedule.timed_pause("eval"):
                evaluation = evaluate_state(s)
                s.logger.log_eval(evaluation)
            s.checkpoints.update_best(evaluation.scores)
        if epoch:
            s.logger.log_epoch(epoch, s.metrics.epoch_means(), evaluation.scores if evaluation else None)
            s.logger.log_bad_rows(s.batches.pairs.bad_rows())
        if saving or s.checkpoints.has_new_best:
            with s.metrics.paused(), s.schedule.timed_pause("save"):
                s.checkpoints.save()
        if ending or stopping or s.checkpoints.out_of_patience:
            break
    return ending or s.checkpoints.out_of_patience, evaluation


def has_ended(s: Session) -> bool:
    """Whether an earlier session took all steps or used the whole budget; a new run takes at least one step."""
    budget, progress = s.state.config.budget, s.progress
    last_step = progress.step == s.schedule.last_step()
    if s.checkpoints.out_of_patience or last_step or progress.has_ended(s.state.config.budget_s):
        return True
    if s.schedule.is_late and not progress.step:
        raise ValueError(f"--budget {budget} was over before the first step")
    return s.schedule.is_late


def eval_is_due(s: Session, epoch: int | None) -> bool:
    if not epoch:
        return s.schedule.needs_trial_eval and s.schedule.has_time_to_eval()
    return epoch % s.state.config.eval_every == 0 and s.schedule.has_time_to_eval()


def evaluate_state(s: Session) -> Evaluation:
    """Evaluate the weights that would be saved."""
    with s.state.averaged_model() as model:
        return s.evaluate(model)


def start_session(setup: Setup, run: Run, console: Console) -> Session:
    """Place model and data on the devices, restore the checkpoint, and write what the run is."""
    config = setup.config
    torch.manual_seed(config.seed)
    model = build_model(config, setup.init, setup.tokenizer)
    set_trainable(model, config, setup.frozen)
    batches, evaluate = make_batches(setup), partial(evaluate_model, pairs=setup.splits.val)
    if setup.frozen:
        batches, val_features = encode_frozen(setup, model, batches, console)
        evaluate = partial(evaluate, features=val_features)
    batch = batches.batch(setup.total - 1)
    choice = device_plan.choose_plan(config, model, batch, setup.total, setup.resumed_plan, console)
    devices.apply_plan(choice.plan)
    memory.retain_freed_memory()
    if setup.init and not setup.checkpoint:
        calibrate_heads(model, setup.init, batches)
    state = TrainState(model, config, replace(choice.plan, compile=False))
    progress = checkpoint.load_checkpoint(setup.checkpoint, state) if setup.checkpoint else Progress()
    views = len(batches.features.images.views) if batches.features.images else 0
    write_run_files(run, state, setup, progress, console, views)
    metrics = StepMetrics(config, state.device)
    epoch_start = batches.epoch_start(progress.step)
    metrics.restore_epoch(record for record in run.records("step") if record["step"] > epoch_start)
    checkpoints = CheckpointManager(run, state, progress, console.warn)
    schedule = make_schedule(setup, progress)
    logger = Logger(run, console, state, progress, batches, schedule, setup.imported)
    chunk_reason = set_chunk(state, progress, batch, logger)
    choice = compile_and_record(run, choice, state, batch, console)
    facts = header(run, setup, choice, state, progress, chunk_reason)
    chance = chance_scores(split_relevance(setup.splits.val))
    console.print_header(facts, metrics.chance, (chance[0].r1, chance[1].r1))
    evaluate = partial(evaluate, chunk=4 * state.chunk)  # no graph is kept
    return Session(
        run,
        console,
        state,
        progress,
        batches,
        schedule,
        metrics,
        logger,
        checkpoints,
        evaluate,
        WaitPolicy(console.print),
    )


def make_batches(setup: Setup) -> BatchStream:
    config, tokenizer, pairs = setup.config, setup.tokenizer, setup.splits.train
    length = config.model.text.context_length
    encode, pad = partial(tokenizer.encode, length=length), partial(tokenizer.pad, length=length)
    return BatchStream(
        pairs,
        partial(tokenizer, length=length),
        config.batch_size,
        config.seed,
        config.model.vision.image_size,
        Augmentation(config.crop_scale, config.hflip, config.color_jitter),
        min(config.captions_per_image, max_captions(pairs)),
        None if "text" in setup.frozen else tokenize_captions(pairs, encode, pad),
    )


def max_captions(pairs: Split) -> int:
    """Captions per image, from the first thousand images."""
    return max(len(pairs.captions(row)) for row in range(min(1000, len(pairs))))


def encode_frozen(
    setup: Setup, model: CLIP, batches: BatchStream, console: Console
) -> tuple[BatchStream, FeatureTables]:
    """Features of both splits from the frozen towers: batches of training features, validation features."""
    from m1clip.training.features import encode_split

    config, splits = setup.config, setup.splits
    device_plan.encoding_plan(config, model, batches.batch(0), console)
    encode = partial(encode_split, model, config=config, towers=setup.frozen, progress=console.progress)
    val_features = encode(splits.val, views=1)
    deadline = None
    if setup.deadline is not None and not setup.views:  # a resumed run keeps its views
        deadline = setup.deadline - HEAD_TIME * (config.budget_s or 0.0)
    features = encode(splits.train, views=setup.views or FEATURE_VIEWS, deadline=deadline)
    views = len(features.images.views) if features.images else 0
    if deadline is not None and 0 < views < FEATURE_VIEWS:
        console.print(f"{views} of {FEATURE_VIEWS} views per image: the budget allows no more")
    return replace(batches, features=features), val_features


def make_schedule(setup: Setup, progress: Progress) -> Schedule:
    """From scratch all of a budget is used; fine-tuning also ends after its epochs."""
    config = setup.config
    max_steps = None if config.recipe == "scratch" else setup.total
    final_evals = 2 if config.patience or config.wise_ft < 1 else 1  # the saved model's, if it is another
    budget_s = config.budget_s or 0.0
    return Schedule(setup.total, setup.deadline, budget_s, max_steps, progress.seconds, final_evals)


def write_run_files(
    run: Run, state: TrainState, setup: Setup, progress: Progress, console: Console, views: int
) -> None:
    """Write the run's files, once the checkpoint is known to fit."""
    config = setup.config
    atomic_write(run.path / "config.json", to_json(config))  # first: from here on the run can be resumed
    if setup.init and not setup.checkpoint and not (run.path / "start").is_dir():
        state.model.save(run.path / "start")
    run.write("data.json", {**setup.splits.record(), "views": views})
    run.truncate_log(progress.step)
    for path, reason in setup.damaged.items():
        checkpoint.set_aside(path)
        run.log("event", progress.step, event="damaged checkpoint", checkpoint=path.name, reason=reason)
        console.warn(f"{path} is damaged ({reason}); resuming from {setup.checkpoint} instead")
    if setup.init.note:
        console.warn(f"{config.init}: {setup.init.note}")
    skipped = setup.splits.skipped
    if skipped:
        console.warn(f"{skipped}; m1clip data check lists them")
    parameters, trained = state.parameter_counts
    counts = {"skipped_rows": len(skipped), "rows": skipped.rows, "parameters": parameters, "trained": trained}
    run.log("event", progress.step, event="resume" if progress.step else "start", **counts)
    if setup.reason:
        run.log("event", progress.step, event="recipe", recipe=config.recipe, reason=setup.reason)
    best = {"best_metric": config.best_metric, "best_score": progress.best_score}
    run.write_status("running", progress.step, total=setup.total, **best)


def set_chunk(state: TrainState, progress: Progress, batch: Batch, logger: Logger) -> str:
    """Choose how many pairs are in memory at once; the reason. A resumed run keeps its chunk."""
    logger.pair_bytes = memory.activation_bytes(state, batch)
    requested = state.config.chunk
    if progress.chunk and (requested == "auto" or requested >= progress.chunk):
        state.chunk, reason = progress.chunk, "as before"
    else:
        state.chunk, reason = memory.choose_chunk(state, batch, logger.pair_bytes)
    progress.chunk = state.chunk
    logger.run.log("event", progress.step, event="chunk", chunk=state.chunk, reason=reason)
    return reason


def compile_and_record(run: Run, choice: PlanChoice, state: TrainState, batch: Batch, console: Console) -> PlanChoice:
    """Compile the blocks if the plan says so, and write machine.json."""
    choice = device_plan.compile_blocks(choice, state, batch, console)
    machine = {
        **sensors.machine(),
        "torch": torch.__version__,
        **choice.record(),
        "cpu_threads": choice.plan.threads or devices.DEFAULT_THREADS,
        "m1clip": __version__,
    }
    if choice.reason == device_plan.SAME_AS_BEFORE:  # keep the reason of the first session
        with suppress(OSError, ValueError, KeyError):
            machine["why"] = run.read("machine.json")["why"]
    run.write("machine.json", machine)
    return choice


def header(
    run: Run, setup: Setup, choice: PlanChoice, state: TrainState, progress: Progress, chunk_reason: str
) -> dict[str, str]:
    """What is about to be trained, for people."""
    config, splits = setup.config, setup.splits
    parameters, trained = (count / 1e6 for count in state.parameter_counts)
    length = f"{setup.total:,} steps"
    if setup.deadline:
        limit = f", at most {length}" if config.recipe != "scratch" else ""
        length = f"{config.budget} of training{limit}"
    position = f"from step {progress.step:,}, " if progress.step else ""
    chunks = "" if state.chunk >= config.batch_size else f", {state.chunk:,} in memory at once"
    threads = choice.plan.threads or devices.DEFAULT_THREADS
    facts = {
        "run": f"{run.path}, {position}{length}",
        "device": f"{choice.plan}: {choice.reason}; {threads} CPU threads",
        "parity": choice.parity or "",
        "recipe": ": ".join(filter(None, (config.recipe, setup.reason))) if setup.init or setup.reason else "",
        "model": f"{parameters:.2f} M parameters"
        + (f", {trained:.2f} M trained" if trained < parameters else "")
        + f"; {config.model.vision.image_size} px images",
        "data": f"{config.data}: {len(splits.train):,} training images, {len(splits.val):,} validation images",
        **splits.facts,
        "tokenizer": token_facts(setup.tokenizer, splits.train, config),
        "batch": f"{config.batch_size:,} pairs{chunks} ({chunk_reason})",
    }
    return {name: fact for name, fact in facts.items() if fact}


def token_facts(tokenizer: Tokenizer, pairs: Split, config: TrainConfig) -> str:
    """Vocabulary size, caption lengths of a sample, and how many are truncated."""
    lengths = tokenizer.lengths(list(islice(sample_captions(pairs), 1000)))
    limit = config.model.text.context_length
    truncated = sum(length > limit for length in lengths) / len(lengths)
    text = f"{len(tokenizer):,} tokens, up to {max(lengths)} per caption"
    return text + (f"; context length {limit} truncates {truncated:.0%} of the captions" if truncated else "")


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    def __init__(self, report: Callable[[str], None]):
        self.report, self.received, self.received_at = report, False, 0.0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
        self.previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received:
            if now - self.received_at < 1:  # one signal sent twice: by a shell to its group, and by `timeout`
                return
            raise KeyboardInterrupt
        self.received, self.received_at = True, now
        name = signal.Signals(number).name
        self.report(f"{name}: finishing this step and saving; send it again to stop at once")
