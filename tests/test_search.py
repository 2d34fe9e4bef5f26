"""Search: which files are found, what the index keeps, queries and their results, and the command."""

import base64
import io
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import unicodedata
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from helpers import QuietConsole
from m1clip import cli
from m1clip.commands.search import Args
from m1clip.config import Preprocess
from m1clip.onnx_model import OnnxCLIP, load_onnx
from m1clip.search import index as indexing
from m1clip.search import update as updating
from m1clip.search.index import Index, index_of
from m1clip.search.query import Library, Searcher, Term, best_first, encode_query, joins_letters, parse_query
from m1clip.search.scan import Version, existing_folder, scan_folder
from m1clip.search.terminal import image_protocol, inline_thumbnail
from m1clip.search.update import Changes, ReadFile, read_in_workers, update_index
from onnx_export import export_tiny, tiny_clip
from photos import jpeg, write_photos


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(tiny_clip(), tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module")
def model(exported: Path) -> OnnxCLIP:
    return load_onnx(exported)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six images in two folders; the index is in a cache of its own."""
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    write_photos(tmp_path / "photos", 3)
    write_photos(tmp_path / "photos" / "trip", 3, start=3)
    return tmp_path / "photos"


def update(model: OnnxCLIP, folder: Path, **options) -> tuple[Index, Changes]:
    index = index_of(model)
    with index.locked(wait=True) as is_mine:
        assert is_mine
        return index, update_index(index, folder, model, QuietConsole(), workers=1, **options)


def indexed_names(index: Index, folder: Path) -> set[str]:
    return {str(file.path.relative_to(folder)) for file in index.image_files(folder)}


def assert_vectors_are_right(index: Index, folder: Path, model: OnnxCLIP) -> None:
    """Every file has the vector of its image."""
    files, vectors_RE = index.image_files(folder), index.open_vectors()
    expected = model.encode_image([file.path for file in files])
    np.testing.assert_allclose(vectors_RE[[file.row for file in files]], expected, atol=1e-5)


# Which files


def test_hidden_files_and_excluded_names_are_skipped(photos):
    for name in (".hidden.jpg", "._0000.jpg", ".thumbs/a.jpg", "notes.txt", "@eaDir/b.jpg"):
        (photos / name).parent.mkdir(exist_ok=True)
        (photos / name).write_bytes(jpeg(7))
    found = scan_folder(photos, exclude=["@eaDir", "*/trip/0004.jpg"])
    names = {os.path.relpath(os.fsdecode(path), photos) for path in found.files}
    assert names == {"0000.jpg", "0001.jpg", "0002.jpg", "trip/0003.jpg", "trip/0005.jpg"}


@pytest.mark.parametrize("pattern", ["trip", "trip/", "*/trip", "./trip", "{photos}/trip", "TRIP"])
def test_a_folder_is_excluded_by_its_name_or_path(photos, pattern):
    found = scan_folder(photos, exclude=[pattern.format(photos=photos)])
    assert len(found.files) == (6 if pattern == "TRIP" else 3)


def test_patterns_match_names_in_either_unicode_form(photos):
    (photos / unicodedata.normalize("NFD", "é.jpg")).write_bytes(jpeg(7))
    (photos / unicodedata.normalize("NFC", "ü.jpg")).write_bytes(jpeg(8))
    assert len(scan_folder(photos, exclude=[unicodedata.normalize("NFC", "é*")]).files) == 7
    assert len(scan_folder(photos, exclude=[unicodedata.normalize("NFD", "ü*")]).files) == 7


def test_files_that_are_only_in_icloud_are_counted_not_read(photos):
    (photos / ".IMG_1.heic.icloud").write_bytes(b"bplist00")
    assert scan_folder(photos).placeholders == 1


def test_links_to_folders_are_followed_on_demand_and_loops_end(photos, tmp_path):
    write_photos(tmp_path / "elsewhere", 1, start=9)
    (photos / "loop").symlink_to(photos)
    (photos / "linked").symlink_to(tmp_path / "elsewhere")
    (photos / "nowhere.jpg").symlink_to(tmp_path / "nothing")
    assert len(scan_folder(photos).files) == 6
    assert len(scan_folder(photos, follow_links=True).files) == 7


def test_a_folder_is_found_by_either_unicode_form_of_its_name(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "Café") for form in ("NFC", "NFD"))
    (tmp_path / decomposed).mkdir()
    assert existing_folder(tmp_path / composed).name == decomposed
    assert existing_folder(tmp_path / decomposed).name == decomposed
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        existing_folder(tmp_path / "other")


# The index


def test_every_image_gets_the_vector_of_its_model(photos, model):
    index, changes = update(model, photos)
    assert (changes.added, changes.known, changes.removed, changes.bad) == (6, 0, 0, {})
    assert_vectors_are_right(index, photos, model)
    assert sorted(path.name for path in photos.rglob("*")) == sorted(["trip", *(f"000{i}.jpg" for i in range(6))])


def test_copies_in_different_batches_are_one_image(photos, model, monkeypatch):
    monkeypatch.setattr(updating, "BATCH", 2)
    for number in range(3):
        shutil.copy(photos / "0000.jpg", photos / "trip" / f"copy{number}.jpg")
    index, changes = update(model, photos)
    assert (changes.added, changes.known) == (6, 3)
    assert_vectors_are_right(index, photos, model)


def test_an_unchanged_library_is_not_read_again(photos, model, monkeypatch):
    update(model, photos)
    monkeypatch.setattr(updating, "read_files", None)  # nothing to read
    _, changes = update(model, photos)
    assert (changes.added, changes.known, changes.removed) == (0, 0, 0)


def test_moved_copied_changed_and_deleted_files_are_noticed(photos, model):
    update(model, photos)
    (photos / "0000.jpg").rename(photos / "trip" / "moved.jpg")
    shutil.copy(photos / "0001.jpg", photos / "copy.jpg")
    (photos / "trip" / "0003.jpg").unlink()
    (photos / "trip" / "0004.jpg").write_bytes(jpeg(40))
    index, changes = update(model, photos)
    assert (changes.added, changes.known, changes.removed) == (1, 2, 2)
    expected = {"0001.jpg", "0002.jpg", "copy.jpg", "trip/0004.jpg", "trip/0005.jpg", "trip/moved.jpg"}
    assert indexed_names(index, photos) == expected
    assert_vectors_are_right(index, photos, model)


def test_a_copy_that_is_read_before_its_original_is_committed_has_one_vector(photos, model, monkeypatch):
    monkeypatch.setattr(updating, "BATCH", 2)
    monkeypatch.setattr(updating, "COMMIT_S", 1e6)
    shutil.copy(photos / "0000.jpg", photos / "trip" / "copy.jpg")
    index, changes = update(model, photos)
    assert (changes.added, changes.known) == (6, 1)
    assert_vectors_are_right(index, photos, model)


def test_an_edit_that_keeps_size_and_time_is_noticed(photos, model):
    """As `touch -r` does."""
    path = photos / "0000.jpg"
    first, second = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (20, 20), "red").save(first, "BMP")
    Image.new("RGB", (20, 20), "blue").save(second, "BMP")
    path.write_bytes(first.getvalue())
    update(model, photos)
    before = path.stat()
    path.write_bytes(second.getvalue())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    index, changes = update(model, photos)
    assert changes.added == 1
    assert_vectors_are_right(index, photos, model)


def test_bad_files_are_remembered_with_their_reason(photos, model, monkeypatch):
    (photos / "cut.jpg").write_bytes(jpeg(1)[:500])
    (photos / "text.png").write_text("not an image")
    (photos / "empty.gif").touch()
    index, changes = update(model, photos)
    assert {Path(name).name for name in changes.bad} == {"cut.jpg", "text.png", "empty.gif"}
    monkeypatch.setattr(updating, "read_files", None)
    assert not update(model, photos)[1].bad
    records = index.files_below(photos)
    assert records[os.fsencode(photos / "empty.gif")].reason == "the file is empty"


def test_files_that_needed_an_extra_are_read_when_it_is_there(photos, model, monkeypatch):
    version = Version(1, 2, 3)
    for kind in ("HEIC", "RAW"):
        record = indexing.FileRecord(b"/a", version, None, kind, "needs an extra")
        monkeypatch.setattr(updating, f"supports_{kind.lower()}", lambda: False)
        assert not updating.needs_reading(record, version)
        monkeypatch.setattr(updating, f"supports_{kind.lower()}", lambda: True)
        assert updating.needs_reading(record, version)


def test_an_image_that_is_turned_by_exif_has_the_vector_of_the_upright_one(photos, model):
    pixels = np.zeros((60, 90, 3), np.uint8)
    pixels[:, :45] = (255, 40, 0)
    upright = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8769)[0x9003] = "2021:07:03 10:20:30"
    upright.save(photos / "upright.png")
    upright.transpose(Image.Transpose.ROTATE_90).save(photos / "turned.jpg", exif=exif, quality=98)
    index, _ = update(model, photos)
    by_name = {file.path.name: file for file in index.image_files(photos)}
    vectors_RE = index.open_vectors()
    assert vectors_RE[by_name["upright.png"].row] @ vectors_RE[by_name["turned.jpg"].row] > 0.99
    assert (by_name["turned.jpg"].width, by_name["turned.jpg"].height) == (90, 60)
    assert by_name["turned.jpg"].date.isoformat() == "2021-07-03T10:20:30"


def test_heic_images_are_indexed_with_the_extra(photos, model):
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    Image.open(photos / "0000.jpg").resize((64, 64)).save(photos / "phone.heic")
    index, changes = update(model, photos)
    assert changes.added == 7
    assert "phone.heic" in indexed_names(index, photos)


def test_names_need_not_be_text(photos, model):
    odd = [b"line\nbreak.jpg", b"\xff\xfe.jpg", "ünïcödé 'quote\".jpg".encode()]
    for number, name in enumerate(odd):
        Path(os.fsdecode(os.path.join(os.fsencode(photos), name))).write_bytes(jpeg(20 + number))
    index, _ = update(model, photos)
    assert {os.fsencode(file.path.name) for file in index.image_files(photos)} >= set(odd)


def test_a_folder_that_cannot_be_listed_keeps_its_images(photos, model, monkeypatch):
    update(model, photos)
    scandir, trip = os.scandir, os.fsencode(photos / "trip")

    def refuse(path):
        if path == trip:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    index, changes = update(model, photos)
    assert changes.found.unreadable == {trip: "Permission denied"}
    assert len(indexed_names(index, photos)) == 6


def test_a_folder_that_cannot_be_read_is_an_error_that_says_why(photos, model, monkeypatch):
    update(model, photos)
    monkeypatch.setattr(os, "scandir", lambda path: os.open(photos / "trip" / "none", os.O_RDONLY))
    with pytest.raises(OSError, match="photos cannot be read: No such file"):
        update(model, photos)
    assert len(index_of(model).image_files(photos)) == 6


def test_a_folder_without_images_is_an_error_and_forgets_nothing(photos, model, tmp_path):
    update(model, photos)
    shutil.move(photos, tmp_path / "unmounted")
    photos.mkdir()
    with pytest.raises(ValueError, match="has no images"):
        update(model, photos)
    assert len(index_of(model).image_files(photos)) == 6


@pytest.mark.parametrize("file", ["vision_model.onnx", "vision_model.onnx.data"])  # weights of large models
def test_an_index_belongs_to_one_vision_encoder(photos, model, exported, tmp_path, file):
    copied = Path(shutil.copytree(exported, tmp_path / "other"))
    record = json.loads((copied / "export.json").read_text())
    record["files"][file] = {"sha256": "0" * 64}
    (copied / "export.json").write_text(json.dumps(record))
    other = load_onnx(copied)
    update(model, photos)
    assert index_of(other).folder != index_of(model).folder
    assert index_of(other).row_count == 0
    assert index_of(load_onnx(exported)).row_count == 6


def test_vectors_without_files_are_removed_when_they_are_many(photos, model, monkeypatch):
    monkeypatch.setattr(indexing, "MIN_UNUSED", 2)
    index, _ = update(model, photos)
    before = index.vectors_path
    for name in ("0000.jpg", "0002.jpg", "trip/0004.jpg"):
        (photos / name).unlink()
    index, _ = update(model, photos)
    assert index.row_count == 3
    assert not before.exists()
    assert_vectors_are_right(index, photos, model)


def test_a_reader_keeps_its_vectors_while_another_process_removes_some(photos, model, monkeypatch):
    monkeypatch.setattr(indexing, "MIN_UNUSED", 2)
    index, _ = update(model, photos)
    library = Library(index, photos)
    before = library.scores(library.vectors_RE[5])
    for name in ("0000.jpg", "0001.jpg", "0002.jpg"):
        (photos / name).unlink()
    update(model, photos)
    np.testing.assert_array_equal(library.scores(library.vectors_RE[5]), before)


def test_a_library_is_opened_again_when_another_process_has_renumbered_its_rows(photos, model, monkeypatch):
    monkeypatch.setattr(indexing, "MIN_UNUSED", 2)
    index, _ = update(model, photos)
    searcher = Searcher(model, Library(index, photos))
    for name in ("0000.jpg", "0001.jpg", "0002.jpg"):
        (photos / name).unlink()
    update(model, photos)
    (hit,) = searcher.search([], [photos / "trip" / "0004.jpg"], top_k=1).hits
    assert (hit.file.path.name, hit.score) == ("0004.jpg", pytest.approx(1, abs=1e-5))


def test_a_library_whose_files_are_all_gone_is_one_sentence(photos, model):
    index, _ = update(model, photos)
    searcher = Searcher(model, Library(index, photos))
    index.remove_files(list(index.files_below(photos)))
    with pytest.raises(ValueError, match="has no image any more"):
        searcher.search(parse_query("a cat"))


def test_similarities_do_not_depend_on_how_vectors_are_read(photos, model):
    index, _ = update(model, photos)
    query_E = model.encode_text("a cat")[0]
    expected = index.open_vectors() @ query_E
    for library in (Library(index, photos), Library(index, photos, reads_once=True)):
        for _ in range(2):
            np.testing.assert_allclose(library.scores(query_E), expected, atol=1e-6)


def test_a_damaged_index_that_another_process_has_built_again_is_kept(photos, model, monkeypatch):
    update(model, photos)
    answers = iter([False, True])
    monkeypatch.setattr(Index, "is_intact", property(lambda self: next(answers)))
    assert index_of(model).row_count == 6


def test_a_process_that_waits_for_another_one_says_so(photos, model):
    index = index_of(model)
    with ExitStack() as other:
        other.enter_context(index.locked(wait=False))
        with index.locked(wait=False) as is_mine:
            assert not is_mine
        with index.locked(wait=True, report=other.close) as is_mine:
            assert is_mine


@pytest.mark.parametrize("damage", ["no database", "cut vectors", "no vectors", "another format"])
def test_a_damaged_index_is_built_again(photos, model, damage):
    index, _ = update(model, photos)
    index.close()
    if damage == "no database":
        (index.folder / "files.sqlite").write_bytes(b"nonsense" * 1000)
    elif damage == "cut vectors":
        os.truncate(index.folder / "vectors-0.f32", 100)
    elif damage == "no vectors":
        (index.folder / "vectors-0.f32").unlink()
    else:
        with sqlite3.connect(index.folder / "files.sqlite") as database:
            database.execute("PRAGMA user_version = 99")
    index, changes = update(model, photos)
    assert changes.added == 6
    assert_vectors_are_right(index, photos, model)


def test_what_a_killed_process_appended_but_did_not_name_is_overwritten(photos, model):
    index, _ = update(model, photos)
    with open(index.vectors_path, "ab") as file:
        file.write(b"\x7f" * 1000)
    write_photos(photos / "new", 2, start=50)
    index, changes = update(model, photos)
    assert changes.added == 2
    assert_vectors_are_right(index, photos, model)


def crash_on_bad(paths):
    """Stands for a decoder that crashes: in a worker process."""
    if b"/bad" in paths:
        os.kill(os.getpid(), signal.SIGSEGV)
    return [ReadFile(path, Version(0, 0, 0), content=path) for path in paths]


@pytest.mark.slow
def test_a_file_that_crashes_the_decoder_is_bad_and_the_others_are_read(monkeypatch):
    monkeypatch.setattr(updating, "FILES_PER_TASK", 3)
    monkeypatch.setattr(Version, "of", lambda status: Version(0, 0, 0))
    monkeypatch.setattr(updating.os, "stat", lambda path: None)
    paths = [b"/a", b"/b", b"/c", b"/d", b"/bad", b"/e", b"/f"]
    files = [file for result in read_in_workers(paths, crash_on_bad, 2) for file in result]
    assert [file.path for file in files] == paths
    assert {file.path: file.kind for file in files if file.kind} == {b"/bad": "crash"}


def die(paths):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_files_are_not_to_blame_if_processes_end_without_them(photos):
    with pytest.raises(MemoryError, match="processes that decode images end at once"):
        list(read_in_workers([b"/a", b"/b"], die, 2))


def test_a_file_that_changes_while_it_is_read_is_left_for_the_next_update(photos, monkeypatch):
    path = photos / "0000.jpg"
    versions = iter([Version(path.stat().st_size, 1, 1), Version(path.stat().st_size, 2, 2)])
    monkeypatch.setattr(Version, "of", lambda status: next(versions))
    assert updating.read_image_file(os.fsencode(path), Preprocess(32), sqlite3.connect(":memory:")) is None
    assert updating.read_image_file(b"/gone.jpg", Preprocess(32), sqlite3.connect(":memory:")) is None


@pytest.mark.slow
def test_killed_at_any_moment_the_index_goes_on(photos, model, exported):
    write_photos(photos / "many", 120, start=60)
    command = [sys.executable, "-m", "m1clip", "search", "a cat", str(photos), "--model", str(exported), "--json"]
    for delay in (0.6, 1.0, 1.4, 1.8, 2.4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.kill()
        process.wait()
    index, _ = update(model, photos)
    assert len(index.image_files(photos)) == 126
    assert_vectors_are_right(index, photos, model)


@pytest.mark.slow
def test_two_processes_at_once_make_one_right_index(photos, model, exported):
    write_photos(photos / "many", 40, start=60)
    command = [sys.executable, "-m", "m1clip", "search", "a cat", str(photos), "--model", str(exported), "--json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    index, changes = update(model, photos)
    assert (changes.added, len(index.image_files(photos))) == (0, 46)
    assert_vectors_are_right(index, photos, model)


# Queries


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ("a dog", [(1, "a dog")]),
        ("dog + snow - person", [(1, "dog"), (1, "snow"), (-1, "person")]),
        ('"dog" + 0.5 * "snow - and ice" - 2*person', [(1, "dog"), (0.5, "snow - and ice"), (-2, "person")]),
        ("a t-shirt, rock+roll", [(1, "a t-shirt, rock+roll")]),
        ("“red car” - «blue»", [(1, "red car"), (-1, "blue")]),
        ("5 dogs", [(1, "5 dogs")]),
    ],
)
def test_a_query_has_terms_with_weights(query, terms):
    assert parse_query(query) == [Term(weight, text) for weight, text in terms]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("dog + ", "has no text beside it"),
        ("dog +", "has no text beside it"),
        ("- dog", "has no text beside it"),
        ('dog - ""', "has no text beside it"),
        ("0 * dog", "nothing to look for"),
        ("x" * 20_000, "may have 10,000 characters"),
    ],
)
def test_a_query_without_sense_is_refused(query, reason):
    with pytest.raises(ValueError, match=reason):
        parse_query(query)


def test_a_query_is_the_weighted_sum_of_its_terms_and_images(model, photos):
    a, b = model.encode_text(["a dog", "snow"])
    image = model.encode_image(photos / "0000.jpg")[0]
    expected = a - 0.5 * b + image
    query_E = encode_query(model, parse_query("a dog + 0 * cat - 0.5 * snow"), [photos / "0000.jpg"])
    np.testing.assert_allclose(query_E, expected / np.linalg.norm(expected), atol=1e-5)
    with pytest.raises(ValueError, match="cancel each other"):
        encode_query(model, parse_query("a dog - a dog"))


def test_the_best_scores_come_first_and_equal_ones_in_order():
    scores = np.array([0.1, 0.9, 0.5, 0.9, -1.0], np.float32)
    assert best_first(scores, 3).tolist() == [1, 3, 2]
    assert best_first(scores, 99).tolist() == [1, 3, 2, 0, 4]
    random = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert best_first(random, 50).tolist() == np.argsort(-random)[:50].tolist()


@pytest.mark.parametrize("part", ["", "trip"])
def test_search_equals_a_sort_by_cosine_in_any_subfolder(photos, model, part):
    index, _ = update(model, photos)
    folder = photos / part
    paths = sorted(folder.rglob("*.jpg"))
    cosines = model.encode_image(paths) @ model.encode_text("a red cat")[0]
    answer = Searcher(model, Library(index, folder)).search(parse_query("a red cat"), top_k=3)
    expected = [paths[i] for i in np.argsort(-cosines)[:3]]
    assert [hit.file.path for hit in answer.hits] == expected
    assert [hit.score for hit in answer.hits] == pytest.approx(sorted(cosines.tolist())[::-1][:3], abs=1e-5)


def test_an_image_is_most_like_itself_and_its_copies_are_one_result(photos, model):
    shutil.copy(photos / "0001.jpg", photos / "trip" / "again.jpg")
    index, _ = update(model, photos)
    answer = Searcher(model, Library(index, photos)).search([], [photos / "0001.jpg"], top_k=2)
    assert answer.hits[0].score == pytest.approx(1, abs=1e-5)
    assert [file.path.name for file in answer.hits[0].files] == ["0001.jpg", "again.jpg"]
    assert len(answer.hits[1].files) == 1


def test_duplicates_are_copies_and_recompressed_images(photos, model):
    shutil.copy(photos / "0001.jpg", photos / "copy.jpg")
    Image.open(photos / "0002.jpg").resize((96, 96)).save(photos / "large.jpg", quality=70)
    index, _ = update(model, photos)
    groups = [[file.path.name for file in group] for group in Library(index, photos).duplicates()]
    assert sorted(map(sorted, groups)) == [["0001.jpg", "copy.jpg"], ["0002.jpg", "large.jpg"]]


def test_a_query_in_letters_that_the_tokenizer_does_not_know_is_refused(photos, model):
    index, _ = update(model, photos)
    for query in ("собака", "a cat - 犬"):
        with pytest.raises(ValueError, match="tokenizer does not know"):
            Searcher(model, Library(index, photos)).search(parse_query(query))
    assert Searcher(model, Library(index, photos)).search(parse_query("café")).hits


@pytest.mark.parametrize(
    ("vocabulary", "letters", "joins"),
    [
        (["the", "##ing", "с", "##о"], "собака", False),
        (["the", "##ing", "соб", "##ака"], "собака", True),
        (["с", "о", "б", "а", "к"], "собака", True),  # a tokenizer of letters
        (["the", "##ing", "犬"], "犬小屋", True),
        (["the", "##ing"], "über", True),
    ],
)
def test_a_script_is_unknown_if_only_tokens_of_others_have_several_letters(vocabulary, letters, joins):
    assert joins_letters(vocabulary, letters) == joins


# The command


@pytest.fixture
def run(photos, exported, capfdbinary):
    def run(*words: object, code: int = 0) -> tuple[bytes, str]:
        assert cli.run_command(["search", *map(str, words), "--model", str(exported), "--workers", "1"]) == code
        out, err = capfdbinary.readouterr()
        return out, err.decode()

    return run


def test_the_command_prints_scores_json_and_paths(photos, run):
    out, err = run("a red cat", photos, "-n", 2)
    assert "6 files" in err
    assert "6 new" in err
    assert len(out.splitlines()) == 2
    (line,) = run("a red cat", photos, "--json", "-n", 4)[0].splitlines()
    answer = json.loads(line)
    assert (answer["query"], answer["images"], answer["nothing"], len(answer["results"])) == ("a red cat", 6, False, 4)
    paths = [result["path"] for result in answer["results"]]
    assert run("a red cat", photos, "--paths", "-n", 4)[0].decode().split("\n")[:-1] == paths
    assert run("a red cat", photos, "--print0", "-n", 4)[0].decode().split("\0")[:-1] == paths


def test_several_queries_are_answered_and_images_can_be_queries(photos, run):
    out, _ = run("a cat", "a dog", photos, "--json")
    assert [json.loads(line)["query"] for line in out.splitlines()] == ["a cat", "a dog"]
    out, _ = run(photos, "--like", photos / "0000.jpg", "--paths", "-n", 1)
    assert out == os.fsencode(photos / "0000.jpg") + b"\n"
    out, _ = run("nothing", photos, "--min", "1", "--json")
    assert json.loads(out)["nothing"]


@pytest.mark.parametrize(
    ("words", "queries"),
    [
        (["a dog", "+", "snow", "-", "a person"], ["a dog + snow - a person"]),
        (["a cat", "a dog", "+", "0.5 * snow"], ["a cat", "a dog + 0.5 * snow"]),
        (["a dog", "+", "trip"], ["a dog + trip"]),
    ],
)
def test_operators_may_be_words_of_their_own(photos, run, monkeypatch, words, queries):
    monkeypatch.chdir(photos)  # where trip is a folder, but not after an operator
    out, _ = run(*words, "--json")
    assert [json.loads(line)["query"] for line in out.splitlines()] == queries


@pytest.mark.parametrize(
    "words",
    [
        ["a cat", "{photos}", "--json", "-n", "1"],
        ["a cat", "-n", "1", "{photos}", "--json"],
        ["-n", "1", "--json", "a cat", "{photos}"],
        ["--json", "a cat", "--top-k=1", "{photos}"],
        ["a cat", "--no-thumbnails", "{photos}", "--min", "-0.99", "-n1", "--json"],
    ],
)
def test_words_may_stand_before_between_and_after_flags(photos, run, words):
    out, _ = run(*(word.format(photos=photos) for word in words))
    answer = json.loads(out)
    assert (answer["query"], answer["images"], len(answer["results"])) == ("a cat", 6, 1)


def test_words_after_two_dashes_are_no_flags(photos):
    assert Args.arrange(["-n", "3", "--", "-dog", "{photos}"]) == ["-n", "3", "--", "-dog", "{photos}"]
    assert Args.arrange(["cat", "--json", "--", "--dog"]) == ["--json", "--", "cat", "--dog"]


def test_the_current_folder_is_searched_by_default(photos, run, monkeypatch):
    monkeypatch.chdir(photos / "trip")
    out, _ = run("a cat")
    assert sorted(line.split()[-1] for line in out.decode().splitlines()) == ["0003.jpg", "0004.jpg", "0005.jpg"]


def test_without_update_the_index_is_searched_as_it_is(photos, run):
    run("a cat", photos)
    (photos / "0000.jpg").unlink()
    assert len(run("a cat", photos, "--no-update", "--paths")[0].splitlines()) == 6
    assert len(run("a cat", photos, "--paths")[0].splitlines()) == 5


@pytest.mark.parametrize(
    ("variables", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm"),
        ({"TERM": "xterm-256color", "KONSOLE_VERSION": "230803"}, "kitty"),
        ({"TERM": "xterm-256color", "KONSOLE_VERSION": "211200"}, None),
        ({"TERM": "xterm-256color"}, None),
        ({"TERM": "tmux-256color", "TERM_PROGRAM": "iTerm.app", "TMUX": "/tmp/tmux-1"}, None),
    ],
)
def test_terminals_that_show_images_are_known_by_their_variables(variables, protocol):
    assert image_protocol(variables) == protocol


def test_a_thumbnail_in_the_terminal_is_the_image(photos):
    text = inline_thumbnail(photos / "0000.jpg", {"TERM": "xterm-kitty"})
    parts = re.findall(r"\x1b_G[^;]*m=(\d);([^\x1b]*)\x1b\\", text)
    assert [more for more, _ in parts] == ["1"] * (len(parts) - 1) + ["0"]
    assert max(len(data) for _, data in parts) <= 4096
    png = Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in parts))))
    (data,) = re.findall(r":([^:]*)\a", inline_thumbnail(photos / "0000.jpg", {"TERM_PROGRAM": "iTerm.app"}))
    np.testing.assert_array_equal(np.asarray(png), np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))))
    with Image.open(photos / "0000.jpg") as original:
        assert abs(np.asarray(png, float) - np.asarray(original)).mean() < 5
    assert inline_thumbnail(photos / "gone.jpg", {"TERM": "xterm-kitty"}) == ""


def test_thumbnails_are_printed_only_in_a_terminal(photos, run, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-kitty")
    assert b"\33_G" not in run("a cat", photos)[0]


def test_a_result_is_one_line_whatever_its_name(photos, run, monkeypatch):
    (photos / "trip" / "line\nbreak\x1b[2J.jpg").write_bytes((photos / "0000.jpg").read_bytes())
    (photos / "0000.jpg").unlink()
    monkeypatch.chdir(photos)
    out, _ = run("a cat")
    assert len(out.splitlines()) == 6
    assert b"trip/line?break?[2J.jpg\n" in out
    assert b"trip/line?break?[2J.jpg\n" in run(photos, "--like", "0001.jpg")[0]


def test_copies_are_one_result_that_says_so(photos, run):
    shutil.copy(photos / "0001.jpg", photos / "copy.jpg")
    assert b"0001.jpg  (+ 1 identical file)\n" in run("a cat", photos)[0]


def test_duplicates_are_printed_in_groups(photos, run):
    shutil.copy(photos / "0001.jpg", photos / "copy.jpg")
    out, _ = run(photos, "--duplicates", "--json")
    assert [Path(file["path"]).name for file in json.loads(out)] == ["0001.jpg", "copy.jpg"]
    assert b"1 group among 6 images" in run(photos, "--duplicates")[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a cat", "no/such/folder/"], "there is no folder no/such/folder"),
        (["", "{photos}"], "the query is empty"),
        ([], "what to search for?"),
        (["{photos}"], "what to search for?"),
        (["a cat", "{photos}", "--exclude", "*"], "has no images that are not excluded"),
        (["a cat", "{photos}", "--exclude", "trip", "--no-update"], "so --no-update cannot use it"),
        (["a cat", "{photos}/0000.jpg/"], "0000.jpg is a file; search needs a folder"),
        (["a cat", "{empty}"], "has no images"),
        (["{photos}", "--like", "nothing.jpg"], "there is no image nothing.jpg"),
        (["{photos}", "--like", "{text}"], "not an image of a known format"),
        (["a cat", "{photos}", "--json", "--paths"], "--json and --paths exclude each other"),
        (["a cat", "{photos}", "-n", "0"], "--top-k must be 1 to 10,000, not 0"),
        (["a cat", "{photos}", "-n", "few"], "-n/--top-k must be a whole number, not 'few'"),
        (["a cat", "{photos}", "--min", "3"], "--min must be -1 to 1, not 3.0"),
        (["a cat", "{photos}", "--no-update"], "has no image that can be searched"),
        (["a cat", "{photos}", "--overwrite"], "--overwrite needs --static"),
        (["a cat", "{photos}", "--port", "99"], "--host, --port, --token and --open need --web"),
    ],
)
def test_wrong_words_are_one_sentence(photos, tmp_path, run, words, sentence):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.jpg").write_text("no image")
    places = {"photos": photos, "empty": tmp_path / "empty", "text": tmp_path / "text.jpg"}
    out, err = run(*(word.format(**places) for word in words), code=2)
    assert out == b""
    assert sentence in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_model_without_its_text_encoder_is_one_sentence(photos, exported, tmp_path, capsys):
    broken = Path(shutil.copytree(exported, tmp_path / "broken"))
    (broken / "text_model.onnx").unlink()
    assert cli.run_command(["search", "a cat", str(photos), "--model", str(broken), "--workers", "1"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("text_model.onnx is missing: export it again")


def test_a_cache_that_cannot_be_written_is_one_sentence(photos, model, monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="cannot be written: No space left on device; M1CLIP_CACHE names another"):
        update(model, photos)
    with pytest.raises(OSError, match="cannot be written: Not a directory; M1CLIP_CACHE names another"):
        Index(photos / "0000.jpg" / "search", 8)


def test_search_never_imports_torch(photos, exported):
    code = "import sys; from m1clip.cli import run_command; run_command(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "search", "a cat", str(photos), "--model", str(exported)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


# Vectors for other programs


def test_vectors_are_exported_for_numpy_parquet_and_qdrant(photos, model, exported, run, tmp_path):
    run("a cat", photos)
    names = [f"000{number}.jpg" for number in range(3)] + [f"trip/000{number}.jpg" for number in (3, 4, 5)]
    expected = model.encode_image([photos / name for name in names])
    for kind in ("npy", "parquet", "qdrant"):
        flags = ["--to", kind, "--out", str(tmp_path / kind), "--model", str(exported)]
        assert cli.run_command(["index", "export", str(photos), *flags]) == 0
        assert cli.run_command(["index", "export", str(photos), *flags]) == 2  # it exists
    lines = (tmp_path / "npy" / "images.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in lines] == names
    table = pyarrow.parquet.read_table(tmp_path / "parquet")
    points = json.loads((tmp_path / "qdrant" / "points-00000.json").read_text())["batch"]
    assert table["path"].to_pylist() == [payload["path"] for payload in points["payloads"]] == names
    for vectors in (np.load(tmp_path / "npy" / "vectors.npy"), table["vector"].to_pylist(), points["vectors"]):
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
