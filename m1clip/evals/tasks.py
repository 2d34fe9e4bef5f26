"""Every task that labelled or captioned images allow, on embeddings that are computed once.

Shapes: N images, M captions, E embedding.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from m1clip.data.choices import Choice
from m1clip.data.index import ProgressFactory, no_progress
from m1clip.data.splits import Split, TrainCaptions
from m1clip.evals.edits import MIN_EDITS, Edit, EditScore, caption_edits, choice_scores, edit_scores
from m1clip.evals.embed import Embedder
from m1clip.evals.evaluate import Evaluation, score_embeddings
from m1clip.evals.examples import image_records
from m1clip.evals.probe import C_VALUES, DRAWS, NEIGHBORS, SHOTS, Probe, linear_probe, require_sklearn, split_by_label
from m1clip.evals.retrieval import Relevance, Retrieval
from m1clip.evals.retrieval import retrieval as retrieval_scores
from m1clip.evals.robustness import MAX_IMAGES, Robustness, robustness
from m1clip.evals.zeroshot import LabelSet, NotApplicable, ZeroShot, class_logits, evaluate_zero_shot, find_labels
from m1clip.model.classify import Classifier, make_classifier
from m1clip.prompts import Prompts, label_key

Task = Literal["retrieval", "zeroshot", "probe", "edits", "robustness"]
TASKS: tuple[Task, ...] = get_args(Task)
MAX_ERRORS = 8
TEST_PART = 0.3  # of the images, where a probe has no training split


@dataclass(frozen=True)
class EvalData:
    """What is evaluated: a split, or the choices of a benchmark."""

    pairs: Split
    train: Callable[[], Split] | None = None  # the training split, opened when a probe needs it
    train_captions: TrainCaptions | None = None
    labels: Sequence[str] = ()  # of all splits
    edits: Sequence[Edit] | None = None  # where the data makes its own
    choices: Sequence[Choice] | None = None


@dataclass
class TaskResults:
    """Results of the tasks that were done; `skipped` has the reason of each other one."""

    retrieval: Retrieval | None = None
    zeroshot: ZeroShot | None = None
    probe: Probe | None = None
    edits: list[EditScore] = field(default_factory=list)
    robustness: Robustness | None = None
    predictions: list[dict[str, Any]] = field(default_factory=list, repr=False)
    # The most confident wrong predictions, with thumbnails.
    errors: list[dict[str, Any]] = field(default_factory=list, repr=False)
    strict: Retrieval | None = None  # only an image's own captions count, as in CLIP_benchmark
    done: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def details(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        parts = {
            "retrieval": self.retrieval and self.retrieval.record(),
            "zeroshot": self.zeroshot and self.zeroshot.details(),
            "probe": self.probe and self.probe.details(),
            "robustness": self.robustness and asdict(self.robustness),
        }
        edits = [asdict(edit) for edit in self.edits]
        known = {name: part for name, part in parts.items() if part}
        lists = {"edits": edits, "predictions": self.predictions}
        return {"tasks": self.done, "skipped": self.skipped, **known, **lists}

    def metrics(self) -> dict[str, dict[str, float | None]]:
        """Scores by task, in the words of CLIP_benchmark."""
        found: dict[str, dict[str, float | None]] = {}
        if one := self.zeroshot:
            scores = {"acc1": one.accuracy, "acc5": one.top5, "mean_per_class_recall": one.mean_per_class}
            found["zeroshot_classification"] = scores
        if strict := self.strict:
            directions = {"image": strict.text_to_image, "text": strict.image_to_text}
            found["zeroshot_retrieval"] = {
                f"{target}_retrieval_recall@{k}": getattr(direction, f"r{k}")
                for target, direction in directions.items()
                for k in (1, 5, 10)
            }
        if probe := self.probe:
            scores = {"acc1": probe.accuracy, "acc5": probe.top5, "mean_per_class_recall": probe.mean_per_class}
            found["linear_probe"] = {f"lp_{key}": value for key, value in scores.items()} | {"C": probe.c}
        if self.edits and self.edits[-1].changed.endswith(" group"):  # Winoground; the last three are of all kinds
            text, image, group = (edit.accuracy for edit in self.edits[-3:])
            found["image_caption_selection"] = {"text_acc": text, "image_acc": image, "acc": group}
        elif self.edits:
            kinds = [edit for edit in self.edits if edit.changed != "all"]
            mean = sum(edit.accuracy * edit.edits for edit in kinds) / sum(edit.edits for edit in kinds)
            found["image_caption_selection"] = {"text_acc": mean}
        return found


class TaskRunner:
    """Runs tasks on one model and one set of images."""

    def __init__(
        self,
        embedder: Embedder,
        data: EvalData,
        prompts: Prompts,
        labels: Sequence[str] = (),
        seed: int = 0,
        progress: ProgressFactory = no_progress,
    ):
        self.embedder, self.data, self.pairs, self.prompts = embedder, data, data.pairs, prompts
        self.requested_labels, self.seed, self.progress = labels, seed, progress
        self.results = TaskResults()

    def run(self, requested: Sequence[Task] = ()) -> TaskResults:
        """The requested tasks, or all that the data allows."""
        if self.data.choices is not None and (unfit := [task for task in requested if task != "edits"]):
            raise ValueError(f"--task {unfit[0]} is not possible with this benchmark: it has choices among captions")
        for task in requested or (TASKS if self.data.choices is None else ("edits",)):
            try:
                getattr(self, task)()
                self.results.done.append(task)
            except NotApplicable as reason:
                if requested:
                    raise ValueError(f"--task {task} is not possible: {reason}") from None
                self.results.skipped[task] = str(reason)
        return self.results

    @cached_property
    def image_NE(self) -> Tensor:
        return self.embedder.images(self.pairs)

    @cached_property
    def captions(self) -> list[Sequence[str]]:
        return list(self.pairs.all_captions())

    @cached_property
    def evaluation(self) -> Evaluation:
        text_ME = self.embedder.texts([text for of_image in self.captions for text in of_image])
        return score_embeddings(self.embedder.model, self.pairs, self.image_NE, text_ME, self.data.train_captions)

    @cached_property
    def labels(self) -> LabelSet:
        return find_labels(self.pairs, self.requested_labels, self.data.labels)

    @cached_property
    def classifier(self) -> Classifier:
        if all(name.isdecimal() for name in self.labels.names):
            raise NotApplicable(f"the labels are numbers ({self.labels.names[0]} …); --labels names them")
        prompts = Prompts(("{}",)) if self.labels.are_captions else self.prompts
        return make_classifier(self.embedder.model, self.labels.names, prompts)

    def retrieval(self) -> None:
        evaluation = self.evaluation
        owner_M = evaluation.relevance.owner_M
        own = Relevance(owner_M, torch.arange(len(owner_M)), len(self.pairs))
        self.results.retrieval = evaluation.scores
        self.results.strict = retrieval_scores(evaluation.image_NE, evaluation.text_ME, own)

    def zeroshot(self) -> None:
        labels, results = self.labels, self.results
        results.zeroshot = evaluate_zero_shot(self.embedder.model, self.image_NE, labels, self.classifier, self.prompts)
        rows = labels.rows
        answers = self.classifier.classify(self.image_NE[rows].numpy(), top_k=1)
        for row, truth, answer in zip(rows.tolist(), labels.truth_N[rows].tolist(), answers, strict=True):
            prediction = {"image": self.pairs.location(row), "label": labels.names[truth], "predicted": answer.label}
            prediction |= {"probability": answer.probability, "none_of_these": answer.none_of_these}
            results.predictions.append(prediction)
        wrong = [k for k, one in enumerate(results.predictions) if one["label"] != one["predicted"]]
        wrong.sort(key=lambda k: -results.predictions[k]["probability"])
        shown = image_records([int(rows[k]) for k in wrong[:MAX_ERRORS]], self.pairs)
        for k in wrong[:MAX_ERRORS]:
            results.errors.append({**results.predictions[k], "jpeg": shown[str(int(rows[k]))].get("jpeg")})

    def probe(self) -> None:
        require_sklearn()
        labels, fits = self.labels, len(C_VALUES) + len(NEIGHBORS) + len(SHOTS) * DRAWS
        notes: tuple[str, ...] = ()
        if self.data.train is None:
            keys = [self.pairs.location(row) for row in range(len(self.pairs))]
            train, test = split_by_label(labels.truth_N, keys, TEST_PART)
            if not len(test):
                raise NotApplicable("no label has two images")
            train_NE, truth_N = self.image_NE[train], labels.truth_N[train]
        else:
            train_pairs, test = self.data.train(), labels.rows
            try:
                known = find_labels(train_pairs)
            except NotApplicable as reason:
                raise NotApplicable(f"of the training split, {reason}") from None
            number = {label_key(name): index for index, name in enumerate(labels.names)}
            for name in known.names:
                number.setdefault(label_key(name), len(number))
            train, notes = known.rows, tuple(f"of the training split, {note}" for note in known.notes)
            truth_N = torch.tensor([number[label_key(known.names[truth])] for truth in known.truth_N[train].tolist()])
            train_NE = self.embedder.images(train_pairs, "encoding training images")[train]
        with self.progress("fitting probes", fits) as advance:
            test_TE, test_T = self.image_NE[test], labels.truth_N[test]
            probe = linear_probe(train_NE, truth_N, test_TE, test_T, self.seed, advance)
        self.results.probe = replace(probe, notes=probe.notes + notes)

    def edits(self) -> None:
        if self.data.choices is not None:
            self.results.edits = choice_scores(self.embedder, self.data.choices, self.image_NE)
            return
        edits = self.data.edits
        if edits is None:
            if TrainCaptions.compare(None, self.captions).labels:
                raise NotApplicable("the captions are labels")
            edits = [(row, *edit) for row, of_image in enumerate(self.captions) for edit in caption_edits(of_image)]
        if len(edits) < MIN_EDITS:
            raise NotApplicable(f"{len(edits)} captions have a word that can be exchanged; {MIN_EDITS} are needed")
        self.results.edits = edit_scores(self.embedder, edits, self.image_NE, self.evaluation.first_text_NE)

    def robustness(self) -> None:
        """Zero-shot accuracy of corrupted images where there are labels, otherwise their retrieval."""
        try:
            labels = self.labels
        except NotApplicable:
            rows = np.linspace(0, len(self.pairs) - 1, min(MAX_IMAGES, len(self.pairs))).astype(int)
            score, metric, chance = self._retrieval_score(rows)
        else:
            known = labels.rows.numpy()
            rows = known[np.linspace(0, len(known) - 1, min(MAX_IMAGES, len(known))).astype(int)]
            truth_N, metric, chance = labels.truth_N[rows], "zero-shot accuracy", 1 / len(labels.names)

            def score(image_NE: Tensor) -> float:
                return (class_logits(self.classifier, image_NE).argmax(1) == truth_N).float().mean().item()

        part = (self.embedder, self.pairs, rows.tolist(), score, metric, chance, self.progress)
        self.results.robustness = robustness(*part)

    def _retrieval_score(self, rows: Any) -> tuple[Callable[[Tensor], float], str, float]:
        """Mean R@1 among some images and their captions, as a function of their embeddings; and chance."""
        if len(rows) < 2:
            raise NotApplicable("there is only one image")
        evaluation = self.evaluation
        relevance = Relevance.from_captions([self.captions[row] for row in rows])
        of_rows = torch.isin(evaluation.relevance.owner_M, torch.from_numpy(rows))
        text_ME = evaluation.text_ME[of_rows]
        clean = retrieval_scores(evaluation.image_NE[rows], text_ME, relevance)
        return lambda image_NE: retrieval_scores(image_NE, text_ME, relevance).mean_r1, "mean R@1", clean.chance_r1
