"""What splits share: seen captions and near duplicates are reported, and --group-by keeps groups in one split."""

import json
from dataclasses import replace

import numpy as np
import pytest

from helpers import train_run
from m1clip import cli
from m1clip.config import requested_config
from m1clip.data.leakage import choose_groups, val_near_duplicates
from m1clip.data.splits import Split, SplitPart
from m1clip.perceptual_hash import connected_rows
from m1clip.run import Run
from photos import SCENES, captions_by_image, image_names, open_source, write_photos


def test_rows_that_share_a_key_directly_or_through_others_are_connected():
    keys = [["a"], ["b"], ["c", "d"], ["b", "c"], ["e"], ["f", "a"]]
    assert connected_rows(keys) == [0, 1, 1, 1, 4, 0]


@pytest.mark.parametrize("seed", range(5))
def test_connected_rows_equal_a_repeated_merge_of_sets(seed):
    rng = np.random.default_rng(seed)
    keys = [set(rng.integers(0, 40, rng.integers(1, 4)).tolist()) for _ in range(40)]
    groups = [{row} for row in range(40)]
    for a in range(40):
        for b in range(a):
            if keys[a] & keys[b] and groups[a] is not groups[b]:
                groups[a] |= groups[b]
                for row in groups[a]:
                    groups[row] = groups[a]
    assert connected_rows(keys) == [min(group) for group in groups]


def test_whole_groups_are_chosen_whatever_the_order_of_rows():
    groups, names = [0, 0, 0, 3, 3, 5, 6], list("aaabbcd")
    is_val = choose_groups(groups, names, 3)
    assert 1 <= is_val.sum() <= 3
    assert {groups[i] for i in np.flatnonzero(is_val)}.isdisjoint(groups[i] for i in np.flatnonzero(~is_val))
    order = [6, 2, 4, 0, 5, 3, 1]
    moved = choose_groups([groups[i] for i in order], [names[i] for i in order], 3)
    assert moved.tolist() == is_val[order].tolist()
    assert choose_groups([0, 0, 2, 2, 2], list("aabbb"), 1).tolist() == [True, True, False, False, False]


@pytest.fixture
def styles(tmp_path):
    """60 images of 20 concepts in three styles: one folder per style, equal captions but for case."""
    lines = ["image,caption"]
    for style in range(3):
        for k, name in enumerate(write_photos(tmp_path / f"style{style}", 20, start=20 * style)):
            lines.append(f"style{style}/{name},{'Thing' if style else 'thing'} {k}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    return tmp_path / "t.csv"


def test_group_by_caption_shares_no_caption_between_splits(styles):
    source = open_source(styles, val_size=10, group_by="caption")
    captions = {name: texts[0].lower() for name, texts in captions_by_image(source).items()}
    train, val = ({captions[name] for name in image_names(pairs)} for pairs in (source.train, source.val))
    assert (len(source.val), len(train & val)) == (9, 0)
    assert image_names(open_source(styles, val_size=10, group_by="caption").val) == image_names(source.val)
    assert "caption" in source.split_reason


def test_group_by_folder_keeps_a_folder_in_one_split(styles):
    source = open_source(styles, val_size=20, group_by="folder")
    folders = [{name.split("/")[0] for name in image_names(pairs)} for pairs in (source.train, source.val)]
    assert (len(folders[1]), folders[0] & folders[1]) == (1, set())


def test_group_by_is_refused_where_it_cannot_hold(styles, tmp_path):
    write_photos(tmp_path, 2)
    (tmp_path / "own.csv").write_text("image,caption,split\n0000.jpg,a,train\n0001.jpg,b,val")
    with pytest.raises(ValueError, match="cannot change the dataset's own val split"):
        open_source(tmp_path / "own.csv", group_by="caption")
    (tmp_path / "same.csv").write_text("image,caption\n0000.jpg,a\n0001.jpg,A")
    with pytest.raises(ValueError, match="all images are in one group"):
        open_source(tmp_path / "same.csv", group_by="caption")
    with pytest.raises(ValueError, match="not for synthetic scenes"):
        open_source("synthetic:9", group_by="caption")


def test_check_reports_captions_in_both_splits_and_names_the_flag(styles, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run_command(["data", "check", str(styles), "--workers", "1"]) == 0
    assert "3 of 3 validation captions also occur in training; --group-by caption" in capsys.readouterr().out
    assert cli.run_command(["data", "check", str(styles), "--workers", "1", "--json", "--group-by", "caption"]) == 0
    assert json.loads(capsys.readouterr().out)["seen_captions"] == 0


def scene_split(rows, size: int) -> Split:
    images = [np.asarray(SCENES.image(row).resize((size, size))) for row in rows]
    return Split([SplitPart(SCENES, np.arange(len(images)), np.stack(images))])


def test_validation_images_that_look_like_a_training_image_are_counted():
    train, val = scene_split(range(60), 80), scene_split([*range(70, 90), 3, 17, 42], 64)
    assert val_near_duplicates(train, val) == 3
    assert val_near_duplicates(train, scene_split(range(70, 90), 64)) == 0


def test_a_run_reports_seen_captions_and_keeps_its_groups(styles, tiny_run, tmp_path, capsys):
    config, runs = replace(tiny_run, data=str(styles), val_size=8, workers=1, recipe="scratch"), tmp_path / "runs"
    result = train_run(config, runs / "r")
    assert result.scores.seen.seen_captions == 8
    assert Run(runs / "r").read("data.json")["val_near_duplicates"] == 0
    assert cli.run_command(["eval", str(runs / "r"), "--device", "cpu"]) == 0
    assert "8 of 8 captions also occur in training; --group-by caption" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cannot change group_by"):
        requested_config({"group_by": "caption"}, resumed=Run(runs / "r").read_config()[0])
