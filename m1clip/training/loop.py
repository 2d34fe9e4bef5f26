"""One training run: place the model, run the loop, keep the result."""

import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from m1clip import __version__, devices, sensors
from m1clip.config import TrainConfig
from m1clip.console import Console
from m1clip.data.batches import Augmentation, Batch, BatchStream, FeatureTables, tokenize_captions
from m1clip.data.splits import Split, TrainCaptions
from m1clip.evals.evaluate import Evaluation, evaluate_model
from m1clip.evals.retrieval import Relevance, Retrieval, chance_scores
from m1clip.format import duration
from m1clip.model.clip import CLIP, load
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run
from m1clip.signals import StopSignal
from m1clip.training import checkpoint, device_plan, memory
from m1clip.training.checkpoint import CheckpointManager, Progress
from m1clip.training.contention import ContentionPolicy
from m1clip.training.device_plan import PlanChoice
from m1clip.training.logger import Logger, StepMetrics, tracking
from m1clip.training.optim import MIN_STEPS, Schedule, learning_rate
from m1clip.training.setup import Setup, build_model, calibrate_heads, sample_captions, set_trainable
from m1clip.training.step import TrainState

if TYPE_CHECKING:  # loaded only with --zeroshot
    from m1clip.evals.zeroshot import ZeroShot


@dataclass(frozen=True)
class TrainResult:
    run: Path
    finished: bool
    step: int
    seconds: float
    scores: Retrieval | None
    best_step: int | None
    restored: bool = False  # the model is that of best_step, not of the last step (--patience)
    zeroshot: "ZeroShot | None" = None  # with --zeroshot

    @property
    def model(self) -> Path:
        """The model folder, for m1clip.load."""
        return self.run / "model"

    def record(self) -> dict[str, Any]:
        """Flat, for a line of JSON."""
        end = {"run": str(self.run), "finished": self.finished, "step": self.step, "seconds": round(self.seconds, 2)}
        parts = [part.record() for part in (self.scores, self.zeroshot) if part]
        return {**end, "best_step": self.best_step, **{key: value for part in parts for key, value in part.items()}}


@dataclass
class Session:
    """The parts of a run in one process."""

    setup: Setup
    run: Run
    console: Console
    state: TrainState
    progress: Progress
    batches: BatchStream
    val_features: FeatureTables
    train_captions: TrainCaptions
    schedule: Schedule
    metrics: StepMetrics
    logger: Logger
    checkpoints: CheckpointManager
    contention: ContentionPolicy


def fit(setup: Setup, run: Run, console: Console) -> TrainResult:
    """Train from the start, or from the last intact checkpoint."""
    s = start_session(setup, run, console)
    progress, checkpoints, config = s.progress, s.checkpoints, s.setup.config
    tracker = tracking(run, config, progress.step, console.warn)
    bar = console.training(progress.step, s.setup.total)
    with StopSignal(console.print) as stop, tracker, closing(s.contention), bar:
        completed, evaluation = training_loop(s, stop)
        checkpoints.finish(completed)
    if checkpoints.out_of_patience:
        s.logger.log_early_stop()
    if completed and config.wise_ft < 1:
        evaluation = evaluate_on_val(s, load(run.model).to_devices(*s.state.model.devices))
        run.log("event", progress.step, event="wise-ft", weight=config.wise_ft, **evaluation.metrics())
    elif completed and (evaluation is None or checkpoints.restored):
        with s.state.averaged_model() as model:
            evaluation = evaluate_on_val(s, model)
    s.logger.write_status("finished" if completed else "stopped")
    if completed and not config.budget_s:  # a budget has no time for it
        near_duplicates = {"val_near_duplicates": s.setup.splits.near_duplicates()}
        with suppress(OSError):  # a full disk: the run is complete without them
            run.write("data.json", {**run.copies["data.json"], **near_duplicates})
    final = evaluation if completed else None
    scores, zeroshot = (final.scores, final.zeroshot) if final else (None, None)
    best = (progress.best_step, checkpoints.restored)
    return TrainResult(run.path, completed, progress.step, progress.seconds, scores, *best, zeroshot)


def training_loop(s: Session, stop: StopSignal) -> tuple[bool, Evaluation | None]:
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
        s.contention.update()

        epoch, ending = s.batches.epoch_end(progress.step), s.schedule.count(progress.step)
        progress.ended_budget_s = config.budget_s if ending else None
        inspecting, saving = progress.step % config.inspect_every == 0, s.checkpoints.is_due()
        stopping = stop.received
        if any((inspecting, saving, epoch, stopping, ending, s.logger.is_due())):
            s.logger.log_steps(s.metrics.read())
        if inspecting:
            s.logger.log_diagnostics(batch, image_BE, text_BE)
        if epoch or ending:
            evaluation = None
        eval_is_due = epoch % config.eval_every == 0 if epoch else s.schedule.needs_trial_eval
        if ending or (eval_is_due and s.schedule.has_time_to_eval()):
            with s.metrics.paused(), s.schedule.timed_pause("eval"), state.averaged_model() as model:
                evaluation = evaluate_on_val(s, model)
                s.logger.log_eval(evaluation)
            s.checkpoints.update_best(evaluation.metrics())
        if epoch:
            s.logger.log_epoch(epoch, s.metrics.epoch_means(), evaluation)
            s.logger.log_bad_rows(s.batches.pairs.bad_rows())
        if saving or s.checkpoints.has_new_best:
            with s.metrics.paused(), s.schedule.timed_pause("save"):
                s.checkpoints.save()
        if ending or stopping or s.checkpoints.out_of_patience:
            break
    return ending or s.checkpoints.out_of_patience, evaluation


def has_ended(s: Session) -> bool:
    """Whether an earlier session took all steps or used the whole budget; a new run takes a few steps in any case."""
    config, step, used_s = s.state.config, s.progress.step, s.progress.ended_budget_s
    if s.schedule.is_late and not step:
        s.console.warn(f"--budget {config.budget} was used before training began: only {MIN_STEPS} steps are taken")
        return False
    has_used_budget = bool(used_s and config.budget_s and config.budget_s <= used_s) or s.schedule.is_late
    return s.checkpoints.out_of_patience or step == s.schedule.last_step() or has_used_budget


def evaluate_on_val(s: Session, model: CLIP) -> Evaluation:
    chunk = 4 * s.state.chunk  # no graph is kept
    with s.run.in_phase("evaluating"):
        evaluation = evaluate_model(model, s.setup.splits.val, s.val_features, chunk, s.train_captions)
        zeroshot = s.setup.zeroshot.evaluate(model, chunk) if s.setup.zeroshot else None
        return replace(evaluation, zeroshot=zeroshot)


def start_session(setup: Setup, run: Run, console: Console) -> Session:
    """Place model and data on the devices, restore the checkpoint, and write what the run is."""
    config = setup.config
    torch.manual_seed(config.seed)
    model = build_model(config, setup.init, setup.tokenizer)
    set_trainable(model, config, setup.frozen)
    if setup.frozen:
        from m1clip.training.features import encode_frozen, plan_encoding

        console.print_fact("recipe", recipe_fact(setup))
        setup = plan_encoding(setup, model, console)
        started = time.monotonic()
        batches, val_features, setup = encode_frozen(setup, model, make_batches(setup), console)
        console.print_fact("features", f"encoded, or read from the cache, in {duration(time.monotonic() - started)}")
    else:
        batches, val_features = make_batches(setup), FeatureTables()
    captions = TrainCaptions.compare(setup.splits.train.all_captions(), list(setup.splits.val.all_captions()))
    setup = replace(setup, config=choose_best_metric(setup.config, captions))
    config, batch = setup.config, batches.batch(setup.total - 1)
    choice = device_plan.choose_plan(config, model, batch, setup.total, setup.resumed_plan, console)
    devices.apply_plan(choice.plan)
    memory.retain_freed_memory()
    if setup.init and not setup.checkpoint:
        calibrate_heads(model, setup.init, batches)
    state = TrainState(model, config, replace(choice.plan, compile=False))
    progress = checkpoint.load_checkpoint(setup.checkpoint, state) if setup.checkpoint else Progress()
    schedule, metrics = make_schedule(setup, progress), StepMetrics(config, state.device, batch.duplicate_BB)
    logger = Logger(run, console, state, progress, batches, schedule, setup.imported)
    checkpoints = CheckpointManager(run, state, progress, console.warn)
    parts = (state, progress, batches, val_features, captions, schedule, metrics, logger, checkpoints)
    s = Session(setup, run, console, *parts, ContentionPolicy(state, console.print))
    write_run_files(s)
    epoch_start = progress.step - progress.step % batches.steps_per_epoch
    metrics.epoch_steps = [record for record in run.records("step") if record["step"] > epoch_start]
    chunk_reason = set_chunk(s, batch)
    choice = device_plan.compile_blocks(choice, state, batch, console)
    write_machine(run, choice)
    print_header(s, choice, chunk_reason)
    return s


def choose_best_metric(config: TrainConfig, captions: TrainCaptions) -> TrainConfig:
    """Label accuracy instead of the default where captions are labels, whose R@1 has as few queries as labels."""
    if captions.labels and config.best_metric == "mean_r1":
        return replace(config, best_metric="label_accuracy")
    if config.best_metric == "label_accuracy" and not captions.labels:
        raise ValueError("--best-metric label_accuracy is for data with labels; these captions are not labels")
    return config


def make_batches(setup: Setup) -> BatchStream:
    config, tokenizer, pairs = setup.config, setup.tokenizer, setup.splits.train
    length, image_size = config.model.text.context_length, config.model.vision.image_size
    encode, pad = partial(tokenizer.encode, length=length), partial(tokenizer.pad, length=length)
    augmentation = Augmentation(config.crop_scale, config.hflip, config.color_jitter)
    most_captions = max(len(pairs.captions(row)) for row in range(min(1000, len(pairs))))
    captions = min(config.captions_per_image, most_captions)
    tokenized = None if "text" in setup.frozen else tokenize_captions(pairs, encode, pad)
    settings = (config.batch_size, config.seed, image_size, augmentation, captions, tokenized)
    return BatchStream(pairs, partial(tokenizer, length=length), *settings)


def make_schedule(setup: Setup, progress: Progress) -> Schedule:
    """From scratch all of a budget is used; fine-tuning also ends after its epochs."""
    config = setup.config
    max_steps = None if config.recipe == "scratch" else setup.total
    final_evals = 2 if config.patience or config.wise_ft < 1 else 1  # the saved model's, if it is another
    return Schedule(setup.total, setup.deadline, config.budget_s or 0.0, max_steps, progress.seconds, final_evals)


def write_run_files(s: Session) -> None:
    """Write the run's files, once the checkpoint is known to fit."""
    setup, run, step, skipped = s.setup, s.run, s.progress.step, s.setup.splits.skipped
    run.write("config.json", asdict(setup.config))  # first: from here on the run can be resumed
    if setup.init and not setup.checkpoint and not (run.path / "start").is_dir():
        s.state.model.save(run.path / "start")
    images = s.batches.features.images
    run.write("data.json", {**setup.splits.record(), "views": len(images.views) if images else 0})
    if unreadable := run.truncate_log(step):
        run.log("event", step, event="damaged log", lines=unreadable)
        s.console.warn(f"{unreadable:,} lines of {run.path / 'metrics.jsonl'} could not be read and were removed")
    for path, reason in setup.damaged.items():
        with suppress(OSError):
            path.rename(path.with_name(f"damaged_{path.name}"))  # deleted after the next save
        run.log("event", step, event="damaged checkpoint", checkpoint=path.name, reason=reason)
        s.console.warn(f"{path} is damaged ({reason}); resuming from {setup.checkpoint} instead")
    if setup.init.note:
        s.console.warn(f"{setup.config.init}: {setup.init.note}")
    if skipped:
        s.console.warn(f"{skipped}; m1clip data check lists them")
    parameters, trained = s.state.parameter_counts
    counts = {"skipped_rows": len(skipped), "rows": skipped.rows, "parameters": parameters, "trained": trained}
    run.log("event", step, event="resume" if step else "start", **counts)
    if setup.reason:
        run.log("event", step, event="recipe", recipe=setup.config.recipe, reason=setup.reason)
    s.logger.write_status("running")


def set_chunk(s: Session, batch: Batch) -> str:
    """Choose how many pairs are in memory at once; the reason. A resumed run keeps its chunk."""
    s.logger.pair_bytes = memory.activation_bytes(s.state, batch)
    previous, requested = s.progress.chunk, s.state.config.chunk
    if previous and (requested == "auto" or requested >= previous):
        chunk, reason = previous, "as before"
    else:
        chunk, reason = memory.choose_chunk(s.state, batch, s.logger.pair_bytes)
    s.state.chunk = s.progress.chunk = chunk
    s.run.log("event", s.progress.step, event="chunk", chunk=chunk, reason=reason)
    return reason


def write_machine(run: Run, choice: PlanChoice) -> None:
    plan, reason = choice.plan, choice.reason
    if reason == device_plan.SAME_AS_BEFORE:  # keep the reason of the first session
        reason = run.read_or_empty("machine.json").get("why", reason)
    record: dict[str, Any] = {"device": plan.device, "why": reason, "plan": asdict(plan), "parity": choice.parity}
    record |= {"cpu_threads": plan.threads or devices.DEFAULT_THREADS, "m1clip": __version__}
    run.write("machine.json", {**sensors.machine(), **record})


def print_header(s: Session, choice: PlanChoice, chunk_reason: str) -> None:
    """What is about to be trained, and chance of every score."""
    setup, config, train, val = s.setup, s.setup.config, s.setup.splits.train, s.setup.splits.val
    parameters, trained = (count / 1e6 for count in s.state.parameter_counts)
    trained_part = f", {trained:.2f} M trained" if trained < parameters else ""
    length = f"{setup.total:,} steps"
    if setup.deadline:
        length = f"{config.budget} of training" + (f", at most {length}" if config.recipe != "scratch" else "")
    position = f"from step {s.progress.step:,}, " if s.progress.step else ""
    chunks = "" if s.state.chunk >= config.batch_size else f", {s.state.chunk:,} in memory at once"
    has_recipe = bool(setup.init or setup.reason)
    facts = {
        "run": f"{s.run.path}, {position}{length}",
        "device": f"{choice.plan}: {choice.reason}; {choice.plan.threads or devices.DEFAULT_THREADS} CPU threads",
        "parity": choice.parity or "",
        "recipe": recipe_fact(setup) if has_recipe and not setup.frozen else "",  # else it is above the encoding
        "model": f"{parameters:.2f} M parameters{trained_part}; {config.model.vision.image_size} px images",
        "data": f"{config.data}: {len(train):,} training images, {len(val):,} validation images",
        **setup.splits.facts,
        "zero-shot": zeroshot_fact(setup),
        "tokenizer": token_facts(setup.tokenizer, train, config),
        "batch": f"{config.batch_size:,} pairs{chunks} ({chunk_reason})",
    }
    i2t, t2i = chance_scores(Relevance.from_captions(list(val.all_captions())))
    chance = {**s.metrics.chance, "chance_i2t_r1": i2t.r1, "chance_t2i_r1": t2i.r1}
    if labels := s.train_captions.labels:
        chance["chance_label"] = 1 / len(labels)
    if zeroshot := setup.zeroshot:
        chance["chance_zeroshot"] = 1 / len(zeroshot.labels.names)
    s.console.print_header({name: fact for name, fact in facts.items() if fact}, chance)


def zeroshot_fact(setup: Setup) -> str:
    if (data := setup.zeroshot) is None:
        return ""
    counts = f"{len(data.labels.rows):,} images, {len(data.labels.names):,} labels"
    return "; ".join([f"{setup.config.zeroshot}: {counts}", *data.labels.notes])


def recipe_fact(setup: Setup) -> str:
    return ": ".join(filter(None, (setup.config.recipe, setup.reason)))


def token_facts(tokenizer: Tokenizer, pairs: Split, config: TrainConfig) -> str:
    """Vocabulary size, caption lengths of a sample, and how many are truncated."""
    lengths = tokenizer.lengths(list(islice(sample_captions(pairs), 1000)))
    limit = config.model.text.context_length
    truncated = sum(length > limit for length in lengths) / len(lengths)
    text = f"{len(tokenizer):,} tokens, up to {max(lengths)} per caption"
    return text + (f"; context length {limit} truncates {truncated:.0%} of the captions" if truncated else "")
