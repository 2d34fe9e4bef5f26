import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m1clip.config import DataConfig
from m1clip.data.caption_text import filename_caption, label_caption, remove_html
from m1clip.data.splits import open_sources, parse_spec
from photos import bad_rows, captions_by_image, coco_json, image_names, jpeg, karpathy_json, open_source, write_photos


def test_caption_files_beside_the_images(tmp_path):
    for i, name in enumerate(write_photos(tmp_path, 30)):
        (tmp_path / name).with_suffix(".txt").write_text(f"scene {i}\nthe same, scene {i}\n")
    (tmp_path / "README.txt").write_text("about this folder")
    source = open_source(tmp_path)
    assert captions_by_image(source)["0003.jpg"] == ["scene 3", "the same, scene 3"]
    assert len(captions_by_image(source)) == 30
    assert not source.bad_rows


def test_missing_empty_and_orphaned_caption_files_are_bad_rows(tmp_path):
    for name in write_photos(tmp_path, 10):
        (tmp_path / name).with_suffix(".txt").write_text("a scene")
    (tmp_path / "0001.txt").unlink()
    (tmp_path / "0002.txt").write_text(" \n ")
    (tmp_path / "0003.txt").write_bytes(b"caf\xff in the rain")
    (tmp_path / "0004.jpg").unlink()
    source = open_source(tmp_path)
    assert bad_rows(source) == {
        ("no caption", "0001.jpg"),
        ("no caption", "0002.jpg"),
        ("not UTF-8", "0003.jpg"),
        ("missing file", "0004.txt"),
    }
    assert len(captions_by_image(source)) == 6


def test_a_folder_with_metadata(tmp_path):
    write_photos(tmp_path / "train", 6)
    write_photos(tmp_path / "test", 3, start=6)
    for split, numbers in (("train", range(6)), ("test", range(6, 9))):
        lines = [json.dumps({"file_name": f"{i:04d}.jpg", "text": f"scene {i}"}) for i in numbers]
        (tmp_path / split / "metadata.jsonl").write_text("\n".join(lines))
    source = open_source(tmp_path)
    assert captions_by_image(source)["train/0002.jpg"] == ["scene 2"]
    assert (len(source.train), len(source.val), source.split_reason) == (6, 3, "the dataset's own test split")
    (tmp_path / "flat").mkdir()
    write_photos(tmp_path / "flat", 4)
    (tmp_path / "flat" / "metadata.csv").write_text("file_name,text\n0000.jpg,one\n0001.jpg,two\n")
    assert captions_by_image(open_source(tmp_path / "flat")) == {"0000.jpg": ["one"], "0001.jpg": ["two"]}


def test_folder_names_become_captions(tmp_path):
    write_photos(tmp_path / "tabby_cat", 3)
    write_photos(tmp_path / "n02099601-airedale", 3, start=3)
    source = open_source(tmp_path)
    assert captions_by_image(source)["tabby_cat/0001.jpg"] == ["a photo of a tabby cat"]
    assert captions_by_image(source)["n02099601-airedale/0004.jpg"] == ["a photo of an airedale"]
    assert captions_by_image(open_source(tmp_path, template="{}, drawn"))["tabby_cat/0001.jpg"] == ["tabby cat, drawn"]
    assert label_caption("An_apple", "this is a {}") == "this is an An apple"


def test_a_folder_of_images_without_captions_says_what_to_do(tmp_path):
    write_photos(tmp_path, 3)
    for caption_from in ("auto", "filename", "text"):  # the names are numbers, and there are no caption files
        with pytest.raises(ValueError, match="`m1clip data template"):
            open_source(tmp_path, caption_from=caption_from)
    (tmp_path / "empty").mkdir()
    for caption_from in ("auto", "folder"):
        with pytest.raises(ValueError, match="has no images in it"):
            open_source(tmp_path / "empty", caption_from=caption_from)


@pytest.mark.parametrize(
    "names",
    [
        *(["New Album (2)", "Paris, 4 July 2021"], ["2021-07-04", "2021-07-05"], ["DCIM", "100APPLE"], ["0", "1"]),
        *(["Screenshots", "Camera Roll"], ["Untitled", "cat"], ["n01440764", "n01443537"], ["class_1", "class_2"]),
        *(["train", "val"], ["train", "cat"], ["flickr30k-images"], ["cat"], ["images", "cat"], ["IMG_1234", "dog"]),
    ],
)
def test_folder_names_that_may_be_no_labels_need_a_flag(tmp_path, names):
    for number, name in enumerate(names):
        write_photos(tmp_path / name, 3, start=3 * number)
    with pytest.raises(ValueError, match=f"has images but no captions.*data template {tmp_path}"):
        open_source(tmp_path)
    captions = {label_caption(name, "a photo of a {}") for name in names}
    assert {text for (text,) in captions_by_image(open_source(tmp_path, caption_from="folder")).values()} == captions


def test_train_is_a_label_among_labels(tmp_path):
    for number, name in enumerate(("bus", "car", "train")):
        write_photos(tmp_path / name, 3, start=3 * number)
    assert captions_by_image(open_source(tmp_path))["train/0007.jpg"] == ["a photo of a train"]


def test_labels_are_used_with_a_note_and_albums_of_a_camera_are_not(tmp_path):
    for number, folder in enumerate(("train/cat", "train/hot dog", "val/cat/images", "val/hot dog/images")):
        write_photos(tmp_path / folder, 3, start=3 * number)
    source = open_source(tmp_path)
    assert (len(source.train), len(source.val)) == (6, 6)
    assert captions_by_image(source)["val/hot dog/images/0009.jpg"] == ["a photo of a hot dog"]
    examples = '"a photo of a cat" (train/cat/0000.jpg), "a photo of a hot dog" (train/hot dog/0003.jpg)'
    assert source.bad_rows.note_lines() == [f"captions from folder names: {examples}"]
    for path in tmp_path.rglob("*.jpg"):
        path.rename(path.with_name(f"IMG_{path.name}"))
    with pytest.raises(ValueError, match=r"file names are those of a camera.*--caption-from folder would use"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        *(("golden_retriever_on_beach", "golden retriever on beach"), ("red-mug-1024x768", "red mug")),
        *(("blueMug (2)", "blue Mug"), ("mug_copy", "mug"), ("dog0001", "dog"), ("017_dog_3", "dog")),
        *(("IMG_1234_a dog", "a dog"), ("iphone_12_case", "iphone 12 case"), ("café%20crème", "café crème")),
        *(("3f2504e0-4f89-11d3-9a0c-0305e82c3301 cat", "cat"), ("shoe-9wg5jCEPBsw", "shoe"), ("红色杯子", "红色杯子")),
        *((name, "") for name in ("IMG_1234", "_DSC1234", "DSC00012", "PXL_20210704_101112345", "P1010012", "🎉")),
        *((name, "") for name in ("1000268201_693b08cb0e", "000000123456", "COCO_train2014_000000123456", "image (3)")),
        *((name, "") for name in ("Screenshot 2021-07-04 at 10.00.00", "3f2504e0-4f89-11d3-9a0c-0305e82c3301")),
    ],
)
def test_words_of_a_file_name(name, caption):
    assert filename_caption(name) == caption


def test_file_names_become_captions_if_asked_for(tmp_path):
    for number, name in enumerate(("red_mug", "blue-mug", "IMG_0001", "GreenMug")):
        (tmp_path / f"{name}.JPG").write_bytes(jpeg(number))
    with pytest.raises(ValueError, match=r'--caption-from filename would use file names: "Green Mug" \(GreenMug.JPG'):
        open_source(tmp_path)
    source = open_source(tmp_path, caption_from="filename", val_size=1)
    assert captions_by_image(source) == {
        "red_mug.JPG": ["red mug"],
        "blue-mug.JPG": ["blue mug"],
        "GreenMug.JPG": ["Green Mug"],
    }
    assert bad_rows(source) == {("no caption", "IMG_0001.JPG")}


def test_descriptions_of_a_google_takeout_are_captions(tmp_path):
    write_photos(tmp_path / "Photos from 2021", 4)
    for number, suffix in enumerate((".json", ".supplemental-metadata.json", ".suppl.json")):
        values = {"title": f"000{number}.jpg", "description": f"scene {number}" if number else ""}
        (tmp_path / "Photos from 2021" / f"000{number}.jpg{suffix}").write_text(json.dumps(values))
    (tmp_path / "Photos from 2021" / "metadata.json").write_text('{"title": "of the album"}')
    source = open_source(tmp_path, val_size=1)
    assert sorted(captions_by_image(source).values()) == [["scene 1"], ["scene 2"]]
    assert bad_rows(source) == {("no caption", "0000.jpg"), ("no caption", "0003.jpg")}


TABLES = {
    "plain.csv": "image,caption\n{0},one\n{1},two\n",
    "wider.csv": 'id,filepath,title,split\n7,{0},"one, quoted",train\n8,{1},two,val\n',
    "semicolon.csv": "url;filename;description\nx;{0};one\ny;{1};two\n",
    "headless.csv": "{0},one\n{1},two\n",
    "tabs.tsv": "path\ttext\n{0}\tone\n{1}\ttwo\n",
    "bars.csv": "image_name| comment_number| comment\n{0}| 0| one\n{1}| 0| two\n",
    "odd names.csv": "bild,beschreibung,jahr\n{0},one,1999\n{1},two,2000\n",
    "lines.jsonl": '{{"file_name": "{0}", "text": "one"}}\n\n{{"file_name": "{1}", "text": "two"}}\n',
    "object.json": '{{"{0}": "one", "{1}": ["two", "second"]}}',
    "inside.json": '{{"data": [{{"image": "{0}", "caption": "one"}}, {{"image": "{1}", "caption": "two"}}]}}',
    "plain.txt": "image,caption\n{0},one\n{1},two\n",
    "token.txt": "{0}#0\tone\n{0}#1\tfirst\n{1}#0\ttwo\n",
    "colons.txt": "{0}: one, with: colons\n{1}: two\n",
    "tabs.txt": "{0}\tone\n{1}\ttwo\n",
    "commas.txt": "{0}, one, a; b; c; d\n{1}, two\n",
    "bom.csv": "\ufeffIMAGE;Caption\n{0};one\n{1};two\n",
    "excel.csv": "sep=;\nimage;caption\n{0};one\n{1};two\n",
    "unquoted.csv": "image_name,comment_number,comment\n{0},0,one, two\n{1},0,two\n",
    "array.json": '[{{"image": "{0}", "caption": "one"}}, {{"image": "{1}", "caption": "two"}}]',
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_in_many_dialects_are_read(tmp_path, name):
    images = write_photos(tmp_path / "images", 2)
    (tmp_path / name).write_text(TABLES[name].format(*images))
    source = open_source(tmp_path / name, val_size=1)
    assert sorted(captions[0].partition(",")[0] for captions in captions_by_image(source).values()) == ["one", "two"]
    assert not source.bad_rows


@pytest.mark.parametrize("name", ["colons.txt", "tabs.txt", "commas.txt", "token.txt", "plain.txt", "unquoted.csv"])
def test_a_captions_file_beside_the_images_of_a_folder(tmp_path, name):
    folder = tmp_path / "photos of 🐕, 2021"
    images = write_photos(folder, 2)
    (folder / f"captions{name[-4:]}").write_text(TABLES[name].format(*images))
    source = open_source(folder, val_size=1)
    assert {image: captions[0][:3] for image, captions in captions_by_image(source).items()} == {
        images[0]: "one",
        images[1]: "two",
    }
    assert source.bad_rows.note_lines() == [f"captions from {folder}/captions{name[-4:]}"]


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["plain.csv", "tabs.tsv", "token.txt", "lines.jsonl"])
def test_a_text_file_that_is_not_utf8_is_decoded_and_noted(tmp_path, name, encoding):
    images = write_photos(tmp_path, 2)
    text = TABLES[name].format(*images).replace("one", "café “crème”")
    (tmp_path / name).write_bytes(text.encode(encoding))
    source = open_source(tmp_path / name, val_size=1)
    assert captions_by_image(source)[images[0]][0] == "café “crème”"
    (note,) = source.bad_rows.note_lines()
    assert note.startswith(f"{tmp_path / name} is not UTF-8; read as {encoding}")
    assert not source.bad_rows


def test_few_lines_that_are_not_utf8_are_bad_rows_and_caption_files_are_decoded_one_by_one(tmp_path):
    images = write_photos(tmp_path, 4)
    texts = ["café".encode(), "crème".encode(), b"caf\xe9", b"plain"]
    lines = [image.encode() + b"," + text for image, text in zip(images, texts, strict=True)]
    (tmp_path / "t.csv").write_bytes(b"\n".join([b"image,caption", *lines]))
    assert bad_rows(open_source(tmp_path / "t.csv", val_size=1)) == {("not UTF-8", "t.csv line 4")}
    (tmp_path / "t.csv").unlink()
    for image, text in zip(images, texts, strict=True):
        (tmp_path / image).with_suffix(".caption").write_bytes(text)
    source = open_source(tmp_path, val_size=1)
    assert captions_by_image(source)[images[2]] == ["café"]
    assert source.bad_rows.note_lines()[1:] == ["1 caption files that are not UTF-8, read as cp1252"]


@pytest.mark.parametrize(
    ("caption", "plain"),
    [
        *(("<b>red</b> mug<br>", "red mug"), ("<p class='x'>one</p><P>two</P>", "one two"), ("red<br/>mug", "red mug")),
        *(("Tom &amp; Jerry&nbsp;", "Tom & Jerry"), ("&lt;b&gt;red&lt;/b&gt;", "red"), ("a<!-- b --> c", "a c")),
        *(
            (text, text) for text in ("<!--" * 100_000, "<script>" * 100_000)
        ),  # unclosed, and quadratic for a lazy match
        *((text, text) for text in ("a < b and c > d", "a <b and c> d", "i <3 you", "<|endoftext|>", "AT&T", "x  y")),
    ],
)
def test_html_is_removed_and_nothing_else(caption, plain):
    assert remove_html(caption) == plain


def test_captions_with_html_are_counted(tmp_path):
    images = write_photos(tmp_path, 3)
    lines = [f"{images[0]},<b>red</b> mug<br>", f"{images[1]},cup &amp; saucer", f"{images[2]},a < b"]
    (tmp_path / "t.csv").write_text("image,caption\n" + "\n".join(lines))
    source = open_source(tmp_path / "t.csv", val_size=1)
    assert sorted(captions_by_image(source).values()) == [["a < b"], ["cup & saucer"], ["red mug"]]
    assert source.bad_rows.note_lines() == ["2 captions with HTML tags or entities, which are removed"]


def test_column_flags_choose_the_columns(tmp_path):
    images = write_photos(tmp_path, 2)
    table = tmp_path / "t.csv"
    table.write_text(f"image,thumb,caption,alt\n{images[0]},{images[1]},long,short\n{images[1]},{images[0]},l2,s2\n")
    source = open_source(table, val_size=1, image_column="thumb", caption_column="alt")
    assert captions_by_image(source) == {images[1]: ["short"], images[0]: ["s2"]}
    with pytest.raises(ValueError, match="no column 'nope'; it has 'thumb', 'caption', 'alt'"):
        open_source(table, caption_column="nope")
    table.rename(tmp_path / "t.txt")
    assert captions_by_image(open_source(tmp_path / "t.txt", val_size=1, caption_column="alt"))[images[0]] == ["short"]
    (tmp_path / "n.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(ValueError, match="which column is the image"):
        open_source(tmp_path / "n.csv")


def test_several_captions_as_repeated_rows_lists_or_numbered_columns(tmp_path):
    a, b, c = write_photos(tmp_path, 3)
    repeated = tmp_path / "repeated.csv"
    repeated.write_text(f"image,caption\n{a},one\n{b},two\n{a},three\n{a},four\n{c},x\n")
    assert captions_by_image(open_source(repeated, val_size=1)) == {a: ["one", "three", "four"], b: ["two"], c: ["x"]}
    lists = tmp_path / "lists.jsonl"
    lists.write_text(
        json.dumps({"image": a, "captions": ["one", "three"]}) + "\n" + json.dumps({"image": b, "captions": ["two"]})
    )
    assert captions_by_image(open_source(lists, val_size=1)) == {a: ["one", "three"], b: ["two"]}
    written = tmp_path / "written.csv"
    written.write_text(f"""image,raw\n{a},"['one', 'three']"\n{b},"[""two""]"\n""")
    assert captions_by_image(open_source(written, val_size=1)) == {a: ["one", "three"], b: ["two"]}
    numbered = tmp_path / "numbered.csv"
    numbered.write_text(f"image,caption_1,caption_2\n{a},one,three\n{b},two,\n")
    assert captions_by_image(open_source(numbered, val_size=1)) == {a: ["one", "three"], b: ["two"]}


def test_broken_lines_are_listed_and_affect_no_other_line(tmp_path):
    images = write_photos(tmp_path, 60)
    lines = ["image,caption,source", *(f'{name},"scene, {i}",web' for i, name in enumerate(images))]
    lines[3] = "0002.jpg"  # line 4: fields missing
    lines[10] = '0009.jpg,"a quotation that never ends,web'
    lines[20] = "0019.jpg,a,b,c,d,e"
    lines[30] = "0029.jpg,,web"
    lines[31] = '0030.jpg,"goes over\ntwo lines",web'  # good, and moves what follows by a line
    lines[40] = "gone.jpg,there is no such file,web"
    text = "\n".join(lines).encode().replace(b"scene, 49", b"sc\xffne")
    (tmp_path / "t.csv").write_bytes(text)
    source = open_source(tmp_path / "t.csv")
    assert bad_rows(source) == {
        ("broken line", "t.csv line 4"),
        ("broken line", "t.csv line 11"),
        ("broken line", "t.csv line 21"),
        ("no caption", "t.csv line 31"),
        ("missing file", "t.csv line 42"),
        ("not UTF-8", "t.csv line 52"),
    }
    assert len(captions_by_image(source)) == 54
    assert captions_by_image(source)["0030.jpg"] == ["goes over\ntwo lines"]
    with pytest.raises(ValueError, match=r"6 of 60 rows are unusable \(3 broken line.*--max-bad-rows"):
        open_source(tmp_path / "t.csv", max_bad_rows=0.01)


def test_a_missing_quotation_mark_affects_no_other_line(tmp_path):
    write_photos(tmp_path, 6)
    lines = [
        "",
        "image,caption",
        '0000.jpg,"lost',
        "0001.jpg,fine",
        '0002.jpg,"quoted, good"',
        '0003.jpg,"also" fine, yes',
    ]
    (tmp_path / "t.csv").write_text("\n".join([*lines, "0004.jpg,commas, that nobody, quoted"]))
    source = open_source(tmp_path / "t.csv", val_size=1)
    assert bad_rows(source) == {("broken line", "t.csv line 3")}
    assert captions_by_image(source) == {
        "0001.jpg": ["fine"],
        "0002.jpg": ["quoted, good"],
        "0003.jpg": ["also fine, yes"],
        "0004.jpg": ["commas, that nobody, quoted"],
    }


def test_the_fraction_of_bad_rows_counts_lines_and_images(tmp_path):
    """A broken line is one of all lines; a missing image is one of all images."""
    names = write_photos(tmp_path, 20)
    lines = [f"{name},caption {k}" for name in names for k in range(5)]
    lines[7] = "broken"
    (tmp_path / "t.csv").write_text("image,caption\n" + "\n".join(lines))
    assert open_source(tmp_path / "t.csv").bad_rows.fraction == pytest.approx(1 / 100)
    (tmp_path / names[9]).unlink()
    assert open_source(tmp_path / "t.csv").bad_rows.fraction == pytest.approx(1 / 100 + 1 / 21)


def test_broken_json_lines_are_listed(tmp_path):
    images = write_photos(tmp_path, 4)
    lines = [json.dumps({"image": name, "caption": f"scene {i}"}).encode() for i, name in enumerate(images)]
    (tmp_path / "t.jsonl").write_bytes(b"\n".join([lines[0], lines[1][:20], b"[1]", b'{"image": "\xff"}', *lines[2:]]))
    assert bad_rows(open_source(tmp_path / "t.jsonl", val_size=1)) == {
        ("broken line", "t.jsonl line 2"),
        ("broken line", "t.jsonl line 3"),
        ("not UTF-8", "t.jsonl line 4"),
    }


def test_parquet_with_paths_and_with_images_inside(tmp_path):
    images = write_photos(tmp_path, 6)
    captions = [[f"scene {i}", f"scene {i} again"] for i in range(6)]
    pq.write_table(pa.table({"image": images, "text": captions}), tmp_path / "paths.parquet")
    assert captions_by_image(open_source(tmp_path / "paths.parquet"))["0004.jpg"] == captions[4]
    plain = pa.table({"image": [jpeg(i) for i in range(6)], "text": captions, "n": range(6)})
    pq.write_table(plain, tmp_path / "bytes.parquet")
    source = open_source(tmp_path / "bytes.parquet")
    rows = {source.all.captions(i)[0]: source.all.read(i) for i in range(6)}
    assert rows == {f"scene {i}": jpeg(i) for i in range(6)}
    inside = pa.table({"pic": [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in range(6)], "text": captions})
    pq.write_table(inside, tmp_path / "structs.parquet", row_group_size=2)
    source = open_source(tmp_path / "structs.parquet")
    assert [source.all.read(i) for i in range(6)] == [jpeg(i) for i in range(6)]
    assert [source.all.location(i) for i in (0, 4)] == [
        f"{tmp_path}/structs.parquet row {i + 1} ({i}.jpg)" for i in (0, 4)
    ]
    (tmp_path / "broken.parquet").write_bytes((tmp_path / "bytes.parquet").read_bytes()[:-50])
    with pytest.raises(ValueError, match="is not a readable Parquet file"):
        open_source(tmp_path / "broken.parquet")


def test_rows_of_parquet_are_located_by_file_and_row(tmp_path):
    images = write_photos(tmp_path, 5)
    for kind, values in (("paths", images), ("bytes", [jpeg(i) for i in range(5)])):
        for name, rows in (("train-0", slice(0, 3)), ("train-1", slice(3, 4)), ("val-0", slice(4, 5))):
            (tmp_path / kind).mkdir(exist_ok=True)
            captions = ["" if i in (1, 3) else f"scene {i}" for i in range(5)]
            table = pa.table({"image": values[rows], "text": captions[rows]})
            pq.write_table(table, tmp_path / kind / f"{name}.parquet")
        source = open_source(tmp_path / kind / "*.parquet", val_size=1)
        assert bad_rows(source) == {("no caption", "train-0.parquet row 2"), ("no caption", "train-1.parquet row 1")}
        assert "val-0.parquet row 1 (" in source.val.location(0)


@pytest.mark.parametrize(
    ("captions", "images"),
    [
        ("results_20130124.token", "flickr30k-images"),
        ("Flickr8k_text/Flickr8k.token.txt", "Flickr8k_Dataset/Flicker8k_Dataset"),
        ("results.csv", "flickr30k_images/flickr30k_images"),
        ("flickr30k_images/results.csv", "flickr30k_images/flickr30k_images"),
        ("captions.txt", "Images"),
        ("dataset_flickr30k.json", "flickr30k-images"),
        ("karpathy/dataset_flickr8k.json", "images"),
    ],
)
def test_flickr_folders_are_recognized_without_a_prefix(tmp_path, captions, images):
    names = write_photos(tmp_path / images, 4)
    lines = {
        "results.csv": ["image_name| comment_number| comment", *(f"{name}| 0| scene {name}" for name in names)],
        "captions.txt": ["image,caption", *(f"{name},scene {name}" for name in names)],
    }
    tokens = [f"{name}#0\tscene {name}" for name in names]
    file = tmp_path / captions
    file.parent.mkdir(exist_ok=True)
    is_json = file.suffix == ".json"
    text = karpathy_json(dict.fromkeys(names, ""), "") if is_json else "\n".join(lines.get(file.name, tokens))
    file.write_text(text)
    source = open_source(tmp_path, val_size=1)
    expected = "Caption 0 of 0001.jpg." if is_json else "scene 0001.jpg"
    assert captions_by_image(source)["0001.jpg"][0] == expected
    assert source.bad_rows.note_lines() == [f"captions from {file}"]


def test_karpathys_files_of_several_datasets_need_a_prefix(tmp_path):
    for dataset in ("coco", "flickr30k"):
        names = write_photos(tmp_path / "set" / "images", 2)
        file = tmp_path / "set" / f"dataset_{dataset}.json"
        file.write_text(karpathy_json(dict.fromkeys(names, ""), dataset))
    with pytest.raises(ValueError, match=f"captions of coco and flickr30k: name one, as in coco:{tmp_path}/set"):
        open_source(tmp_path / "set")
    (tmp_path / "set").rename(tmp_path / "flickr30k")
    assert len(open_source(tmp_path / "flickr30k", val_size=1).all) == 2


def test_a_caption_table_in_each_split_folder(tmp_path):
    for split, start in (("train", 0), ("val", 4)):
        names = write_photos(tmp_path / split, 4, start)
        (tmp_path / split / "captions.csv").write_text("image,caption\n" + "\n".join(f"{name},x" for name in names))
    source = open_source(tmp_path)
    assert (len(source.train), len(source.val)) == (4, 4)


def test_coco_as_it_is_distributed(tmp_path):
    for split, start, count in (("train2017", 0, 8), ("val2017", 8, 3)):
        names = write_photos(tmp_path / split, count, start)
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations" / f"captions_{split}.json").write_text(coco_json(names, first=start + 1))
        (tmp_path / "annotations" / f"instances_{split}.json").write_text("{}")
    source = open_source(f"coco:{tmp_path}")
    assert (len(source.train), len(source.val), source.split_reason) == (8, 3, "the dataset's own val split")
    assert captions_by_image(source)["val2017/0009.jpg"] == [f"caption {k} of 0009.jpg" for k in range(5)]
    assert not source.bad_rows
    file = tmp_path / "annotations" / "captions_val2017.json"
    assert len(captions_by_image(open_source(file))) == 3


def test_bad_rows_of_coco_are_counted(tmp_path):
    names = write_photos(tmp_path / "val2017", 4)
    (tmp_path / "val2017" / names[1]).unlink()
    values = json.loads(coco_json(names))
    values["annotations"].append({"id": 1, "image_id": 999, "caption": "of nothing"})
    values["annotations"] = [entry for entry in values["annotations"] if entry["image_id"] != 3]
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "captions_val2017.json").write_text(json.dumps(values))
    source = open_source(f"coco:{tmp_path}", val_size=1)
    assert source.bad_rows.counts == {"broken line": 1, "no caption": 1, "missing file": 1}


def test_a_broken_first_line_of_a_token_file_is_listed(tmp_path):
    names = write_photos(tmp_path / "images", 4)
    lines = ["what is this", *(f"{name}#0\tscene" for name in names)]
    (tmp_path / "Flickr8k.token.txt").write_text("\n".join(lines))
    assert bad_rows(open_source(f"flickr8k:{tmp_path}", val_size=1)) == {("broken line", "Flickr8k.token.txt line 1")}


def test_karpathys_splits(tmp_path):
    names = write_photos(tmp_path / "Images", 8)
    splits = dict(zip(names, ["train"] * 4 + ["restval", "val", "test", "test"], strict=True))
    (tmp_path / "dataset_flickr30k.json").write_text(karpathy_json(splits, "flickr30k"))
    source = open_source(f"flickr30k:{tmp_path}")
    assert (len(source.train), len(source.val), len(source.test)) == (5, 1, 2)
    assert captions_by_image(source)["0005.jpg"][2] == "Caption 2 of 0005.jpg."
    coco = tmp_path / "coco"
    write_photos(coco / "val2014", 8)
    (coco / "dataset_coco.json").write_text(karpathy_json(splits, "coco", filepath="val2014"))
    assert image_names(open_source(f"coco:{coco}").val) == {"val2014/0005.jpg"}


def test_flickr8k_as_it_is_distributed(tmp_path):
    names = write_photos(tmp_path / "Flicker8k_Dataset", 9)
    text = tmp_path / "Flickr8k_text"
    text.mkdir()
    lines = [f"{name}#{k}\tcaption {k} of {name} ." for name in names for k in range(5)]
    lines += ["2258277193_586949ec62.jpg.1#0\ta image that was never there"]  # the set has this line
    (text / "Flickr8k.token.txt").write_text("\n".join(lines))
    (text / "Flickr8k.lemma.token.txt").write_text("\n".join(lines).replace("caption", "lemma"))
    for split, part in (("train", names[:5]), ("dev", names[5:7]), ("test", names[7:8])):
        (text / f"Flickr_8k.{split}Images.txt").write_text("\n".join(part) + "\n")
    source = open_source(f"flickr8k:{tmp_path}")
    assert (len(source.train), len(source.val), len(source.test)) == (5, 2, 1)
    assert captions_by_image(source)[names[8]][4] == f"caption 4 of {names[8]} ."  # listed, but in no split
    assert bad_rows(source) == {("missing file", "Flickr8k.token.txt line 46")}


def test_flickr30k_as_kaggle_distributes_it(tmp_path):
    names = write_photos(tmp_path / "flickr30k_images", 6)
    lines = [
        "image_name| comment_number| comment",
        *(f"{name}| {k}| caption {k}, {name} ." for name in names for k in range(5)),
    ]
    lines[8] = f"{names[1]}| 2   A dog runs across the grass ."  # as in the real file: a bar is missing
    (tmp_path / "results.csv").write_text("\n".join(lines))
    for split, part in (("train", names[:4]), ("val", names[4:])):
        (tmp_path / f"{split}.txt").write_text("\n".join(name.removesuffix(".jpg") for name in part))
    source = open_source(f"flickr30k:{tmp_path}")
    assert (len(source.train), len(source.val)) == (4, 2)
    assert len(captions_by_image(source)[names[1]]) == 4
    assert captions_by_image(source)[names[0]][0] == f"caption 0, {names[0]} ."
    assert bad_rows(source) == {("broken line", "results.csv line 9")}


def test_an_image_is_never_in_both_splits(tmp_path):
    """The split is a function of the bytes: copies stay together; names, order and other rows do not matter."""
    write_photos(tmp_path / "a", 60)
    for i in range(20):
        (tmp_path / "a" / f"copy{i}.jpg").write_bytes(jpeg(i))
    for image in (tmp_path / "a").iterdir():
        image.with_suffix(".txt").write_text("a scene")
    source = open_source(tmp_path / "a", val_size=15)
    val = {source.val.read(i) for i in range(len(source.val))}
    train = {source.train.read(i) for i in range(len(source.train))}
    assert len(val) == 15
    assert not val & train
    lines = [f"a/{name},again" for name in sorted(f"{i:04d}.jpg" for i in range(60))[::-1]]
    (tmp_path / "other.csv").write_text("\n".join(["image,caption", *lines]))
    other = open_source(tmp_path / "other.csv", val_size=15)
    assert {other.val.read(i) for i in range(len(other.val))} == val


def test_validation_images_of_one_source_are_removed_from_the_training_split_of_another(tmp_path):
    write_photos(tmp_path, 40)
    for table, names in (("a.csv", range(30)), ("b.csv", range(10, 40))):
        (tmp_path / table).write_text("image,caption\n" + "\n".join(f"{i:04d}.jpg,scene {i}" for i in names))
    a, b = open_sources(DataConfig(data=f"{tmp_path}/a.csv@3+{tmp_path}/b.csv", val_size=8))
    assert (a.weight, b.weight) == (3, 1)
    val = image_names(a.val) | image_names(b.val)
    assert not val & (image_names(a.train) | image_names(b.train))
    for source, other, numbers in ((a, b, range(30)), (b, a, range(10, 40))):
        removed = len({f"{i:04d}.jpg" for i in numbers} & image_names(other.val) - image_names(source.val))
        reason = f"training images of {source.spec} removed: in the val or test split of another source"
        assert source.bad_rows.notes == ({reason: removed} if removed else {})
    assert a.bad_rows.notes + b.bad_rows.notes


def test_copies_in_two_splits_of_a_source_in_a_mixture_are_removed_and_noted(tmp_path):
    write_photos(tmp_path, 10)
    (tmp_path / "copy.jpg").write_bytes(jpeg(0))
    lines = [f"000{i}.jpg,scene,{'val' if i < 2 else 'train'}" for i in range(10)]
    (tmp_path / "a.csv").write_text("\n".join(["image,caption,split", *lines, "copy.jpg,scene,train"]))
    write_photos(tmp_path / "b", 10, start=20)
    (tmp_path / "b.csv").write_text("image,caption\n" + "\n".join(f"b/00{i}.jpg,scene" for i in range(20, 30)))
    a, b = open_sources(DataConfig(data=f"{tmp_path}/a.csv+{tmp_path}/b.csv"))
    assert (len(a.train), b.bad_rows.note_lines()) == (8, [])
    reason = f"training images of {tmp_path}/a.csv removed: in the val or test split of the same source"
    assert a.bad_rows.note_lines() == [f"1 {reason}"]


def test_a_spec_is_parsed_into_sources_and_weights(tmp_path):
    assert parse_spec("coco:x@2+synthetic:5") == [("coco:x", 2), ("synthetic:5", 1)]
    (tmp_path / "a+b@2").mkdir()
    assert parse_spec(f"{tmp_path}/a+b@2") == [(f"{tmp_path}/a+b@2", 1)]
    for wrong in ("a@0+b", "a@1.2.3", " "):
        with pytest.raises(ValueError, match=r"weight|number|empty"):
            parse_spec(wrong)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sinthetic:5", "did you mean synthetic"),
        ("synthetic:ten", "whole number"),
        ("synthetic:0", "1 to"),
        ("no/such/folder", "there is no such file or folder"),
        ("coco:/no/such", "needs the folder of coco"),
        ("nothing-{000..003}.tar", "no data source"),
        (__file__, "cannot be read; expected a folder"),
        ("photos.zip", "photos.zip is an archive; unpack it"),
    ],
)
def test_an_invalid_spec_is_refused(tmp_path, monkeypatch, spec, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos.zip").write_bytes(b"PK")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        open_source(spec)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["train", "val2017", "testA", "minival"], (1, 2, 1)),
        (["train", "val", "test-dev", "extra"], (1, 1, 1)),
        (["A", "B", "C", "D"], (3, 1, 0)),  # no splits: split by hash
    ],
)
def test_words_for_splits(tmp_path, words, sizes):
    names = write_photos(tmp_path, 4)
    lines = [f"{name},x,{word}" for name, word in zip(names, words, strict=True)]
    (tmp_path / "t.csv").write_text("image,caption,split\n" + "\n".join(lines))
    source = open_source(tmp_path / "t.csv", val_size=2 if sizes[2] else 1)
    assert (len(source.train), len(source.val), len(source.test or [])) == sizes


def test_many_files_or_folders_are_one_source(tmp_path):
    for split, start in (("train2017", 0), ("val2017", 5)):
        names = write_photos(tmp_path / split, 5, start)
        (tmp_path / f"captions_{split}.json").write_text(coco_json(names, first=start + 1))
    source = open_source(tmp_path / "captions_{train,val}2017.json")
    assert (len(source.train), len(source.val)) == (5, 5)
    write_photos(tmp_path / "a" / "cat", 3)
    write_photos(tmp_path / "b" / "dog", 3, start=3)
    source = open_source(tmp_path / "{a,b}", caption_from="folder")
    assert set(captions_by_image(source)) >= {"a/cat/0000.jpg", "b/dog/0003.jpg"}


def test_known_datasets_are_recognized_and_generic_folder_names_are_no_labels(tmp_path):
    """Flickr8k as a plain folder once gave 7,000 times "a photo of an images"."""
    names = write_photos(tmp_path / "flickr" / "images", 4)
    with pytest.raises(ValueError, match="has images but no captions"):
        open_source(tmp_path / "flickr")
    (tmp_path / "flickr" / "captions.txt").write_text("image,caption\n" + "\n".join(f"{n},scene {n}" for n in names))
    assert captions_by_image(open_source(tmp_path / "flickr", val_size=1))["0001.jpg"] == ["scene 0001.jpg"]
    names = write_photos(tmp_path / "coco" / "train2014", 4)
    (tmp_path / "coco" / "annotations").mkdir()
    (tmp_path / "coco" / "annotations" / "captions_train2014.json").write_text(coco_json(names))
    assert len(captions_by_image(open_source(tmp_path / "coco", val_size=1))["train2014/0002.jpg"]) == 5


def test_hand_written_tables_and_folders(tmp_path):
    """Backslashes, upper-case suffixes, captions named after the file, no suffixes, UTF-16, other folders."""
    write_photos(tmp_path / "set" / "images", 4)
    for i in range(4):
        (tmp_path / "set" / "images" / f"plain{i}").write_bytes(jpeg(i))
    tables = tmp_path / "set" / "annotations"
    tables.mkdir()
    (tables / "slash.csv").write_text("image,caption\n" + "\n".join(f"images\\000{i}.jpg,scene {i}" for i in range(4)))
    (tables / "bare.csv").write_text("image,caption\n" + "\n".join(f"plain{i},scene {i}" for i in range(4)))
    (tables / "wide.csv").write_text(
        "image\tcaption\n" + "\n".join(f"000{i}.jpg\tscene, {i}" for i in range(4)), "utf-16"
    )
    for name in ("slash.csv", "bare.csv", "wide.csv"):
        source = open_source(tables / name, val_size=1)
        assert (name, len(source.all), len(source.bad_rows)) == (name, 4, 0)
    write_photos(tmp_path / "beside", 2)
    (tmp_path / "beside" / "0000.jpg").rename(tmp_path / "beside" / "A.JPG")
    (tmp_path / "beside" / "A.TXT").write_text("one")
    (tmp_path / "beside" / "0001.jpg.txt").write_text("two")
    assert captions_by_image(open_source(tmp_path / "beside", val_size=1)) == {"A.JPG": ["one"], "0001.jpg": ["two"]}


def test_ids_are_no_captions(tmp_path):
    write_photos(tmp_path, 2)
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A scene."}]
    rows = [{"id": f"p{i}", "image": f"000{i}.jpg", "conversations": turns} for i in range(2)]
    (tmp_path / "llava.json").write_text(json.dumps(rows))
    assert captions_by_image(open_source(tmp_path / "llava.json", val_size=1))["0000.jpg"] == ["A scene."]
    (tmp_path / "ids.csv").write_text("id,image\n1,0000.jpg\n2,0001.jpg")
    with pytest.raises(ValueError, match="which column is the caption"):
        open_source(tmp_path / "ids.csv")


def test_a_table_of_urls_needs_no_header(tmp_path):
    (tmp_path / "t.tsv").write_text("\n".join(f"scene {i}\thttp://x/{i}.jpg?size=8" for i in range(5)))
    with pytest.raises(ValueError, match="5 of 5 rows"):
        open_source(tmp_path / "t.tsv")


def test_an_image_may_have_thousands_of_captions(tmp_path):
    write_photos(tmp_path, 2)
    lines = [f"000{i % 2}.jpg,caption {i}" for i in range(6000)]
    (tmp_path / "t.csv").write_text("image,caption\n" + "\n".join(lines))
    pairs = open_source(tmp_path / "t.csv", val_size=1).all
    assert len(pairs.captions(1)) == 3000
    assert pairs.captions(1)[2999] == "caption 5999"


def test_split_names_are_no_labels(tmp_path):
    write_photos(tmp_path / "train", 3)
    write_photos(tmp_path / "val", 3, start=3)
    with pytest.raises(ValueError, match="has images but no captions"):
        open_source(tmp_path)


def test_val_size_must_leave_training_images(tmp_path):
    write_photos(tmp_path / "cat", 5)
    with pytest.raises(ValueError, match="--val-size 5 of 5 distinct images leaves none"):
        open_source(tmp_path, val_size=5, caption_from="folder")


MILLION = """
import resource, sys
from pathlib import Path
import numpy as np
import psutil
from m1clip.config import DataConfig
from m1clip.data.index import IndexedPairs, IndexWriter
from m1clip.data.index import BadRows, Listing, Row

def rows():
    for i in range(1_000_000):
        caption = f"caption {i}: a dog runs over the wet grass towards number {i % 977}"
        offset = i * 7919 % 700_000
        yield Row(f"image-{offset:07d}.jpg", [caption], container=sys.argv[2], offset=offset, length=100)

before = psutil.Process().memory_info().rss
folder = Path(sys.argv[1])
IndexWriter(Listing(".", rows()), DataConfig(), BadRows()).write(folder, lambda n: None)
pairs = IndexedPairs(folder)
rows = np.random.default_rng(0).integers(0, len(pairs), 20_000)
assert all(pairs.captions(int(i))[0].startswith("caption") for i in rows)
assert pairs.column("container").shape == (700_000,)
if sys.platform == "linux":  # there, ru_maxrss is inherited from the parent process
    peak = 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(pairs), peak - before)
"""


def test_a_million_rows_need_less_than_300_mb(tmp_path):
    (tmp_path / "shard.tar").write_bytes(b"x")
    (tmp_path / "index").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MILLION, str(tmp_path / "index"), str(tmp_path / "shard.tar")],
        capture_output=True,
        text=True,
        check=True,
    )
    images, grown = map(int, done.stdout.split())
    assert images == 700_000
    assert grown < 300e6


def write_table(folder, caption, count=4):
    """A table of images, one of them with that caption; the others are intact."""
    names = write_photos(folder, count)
    rows = "".join(f"{name},scene {i}\n" for i, name in enumerate(names[1:], 1))
    (folder / "table.csv").write_text(f"image,caption\n{names[0]},{caption}\n{rows}")
    return folder / "table.csv"


@pytest.mark.parametrize("letter", ["a", "é", "字", "🙂"])
def test_long_captions_are_truncated_to_10000_bytes_and_counted(tmp_path, letter):
    source = open_source(write_table(tmp_path, letter * 300_000))
    (caption,) = captions_by_image(source)["0000.jpg"]
    assert caption == letter * (10_000 // len(letter.encode()))
    assert source.bad_rows.note_lines() == ["1 captions longer than 10,000 bytes, which are truncated"]


def test_a_caption_of_10000_bytes_is_kept(tmp_path):
    source = open_source(write_table(tmp_path, "é" * 5000))
    assert captions_by_image(source)["0000.jpg"] == ["é" * 5000]
    assert not source.bad_rows.note_lines()


def test_of_a_line_of_many_megabytes_only_the_beginning_is_read(tmp_path):
    source = open_source(write_table(tmp_path, "x" * 5_000_000))
    captions = captions_by_image(source)
    assert captions["0000.jpg"] == ["x" * 10_000]
    assert captions["0003.jpg"] == ["scene 3"]
    assert source.all.location(3).endswith("line 5 (0003.jpg)")  # the long line counts as one


def test_a_path_or_a_split_of_a_million_characters_affects_no_other_row(tmp_path):
    names = write_photos(tmp_path, 4)
    rows = [f"{names[0]},a,{'1' * 400_000}x", f"{'a' * 400_000}.jpg,b,train", f"{names[1]},c,val"]
    (tmp_path / "table.csv").write_text("\n".join(["image,caption,split", *rows]))
    source = open_source(tmp_path / "table.csv")
    assert captions_by_image(source).keys() == {"0000.jpg", "0001.jpg"}
    assert bad_rows(source) == {("broken line", "table.csv line 3")}


def test_captions_in_deeply_nested_lists_are_bad_rows(tmp_path):
    names = write_photos(tmp_path, 4)
    nested = ["[" * depth + '"a cat"' + "]" * depth for depth in (2, 3, 300, 900)]
    rows = (f'{{"image": "{name}", "caption": {value}}}\n' for name, value in zip(names, nested, strict=True))
    (tmp_path / "table.jsonl").write_text("".join(rows))
    source = open_source(tmp_path / "table.jsonl")
    assert captions_by_image(source) == {"0000.jpg": ["a cat"], "0001.jpg": ["a cat"]}
    assert len(source.bad_rows) == 2


def test_half_a_surrogate_pair_in_a_long_caption_is_one_bad_row(tmp_path):
    names = write_photos(tmp_path, 3)
    captions = ["\\ud800" + "a" * 5000, "b", "c"]
    rows = (f'{{"image": "{name}", "caption": "{caption}"}}\n' for name, caption in zip(names, captions, strict=True))
    (tmp_path / "table.jsonl").write_text("".join(rows))
    assert bad_rows(open_source(tmp_path / "table.jsonl")) == {("not UTF-8", "table.jsonl line 1")}


def test_a_json_table_that_would_not_fit_into_memory_is_refused_with_the_number_needed(tmp_path, monkeypatch):
    write_photos(tmp_path, 3)
    (tmp_path / "table.json").write_text("[" + ",".join(["[]"] * 100_000) + "]")
    monkeypatch.setattr("m1clip.data.tables.available_gb", lambda: 0.01)
    with pytest.raises(MemoryError, match=r"table\.json needs about 0\.0 GB of memory, 0\.0 GB are available"):
        open_source(tmp_path / "table.json")


def test_many_lines_after_an_open_quote_are_read_in_linear_time(tmp_path):
    names = write_photos(tmp_path, 3)
    rows = [f"{names[1]},c", f"{names[2]},d", f'{names[0]},"a', *["b"] * 300_000]
    (tmp_path / "table.csv").write_text("\n".join(["image,caption", *rows]))
    source = open_source(tmp_path / "table.csv")  # took minutes: a chain of 300,000 chains
    assert captions_by_image(source) == {"0001.jpg": ["c"], "0002.jpg": ["d"]}


def test_an_entity_of_thousands_of_digits_is_text(tmp_path):
    source = open_source(write_table(tmp_path, "a cat &#" + "9" * 5000 + "; &amp;amp; co"))
    (caption,) = captions_by_image(source)["0000.jpg"]
    assert caption.startswith("a cat & #999")
    assert caption.endswith("; & co")


@pytest.mark.parametrize(
    "spec", ["a{0..999999999999}.tar", "{0..99999}{0..99999}.tar", "{a,b}" * 40, "{0..9" + "9" * 30 + "}"]
)
def test_a_path_that_stands_for_too_many_files_is_refused(spec):
    with pytest.raises(ValueError, match="stands for more than 1,000,000 files"):
        open_source(spec)
