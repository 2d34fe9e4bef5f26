import http.server
import io
import json
import os
import tarfile
import threading

import pytest
import webdataset

from photos import bad_rows, captions_by_image, jpeg, open_source, write_photos, write_tar


def pair_members(start: int, count: int) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for i in range(start, start + count):
        members[f"{i:09d}.jpg"] = jpeg(i)
        members[f"{i:09d}.json"] = json.dumps(
            {"caption": f"scene {i}", "key": f"{i:09d}", "status": "success"}
        ).encode()
        members[f"{i:09d}.txt"] = f"scene {i}".encode()
    return members


def test_shards_are_read_as_webdataset_itself_reads_them(tmp_path):
    for k in range(3):
        write_tar(tmp_path / f"{k:05d}.tar", pair_members(10 * k, 10))
    source = open_source(tmp_path / "{00000..00002}.tar")
    theirs = {
        sample["txt"].decode(): sample["jpg"]
        for sample in webdataset.WebDataset(str(tmp_path / "{00000..00002}.tar"), shardshuffle=False)
    }
    ours = {source.all.captions(i)[0]: source.all.read(i) for i in range(len(source.all))}
    assert ours == theirs
    assert len(theirs) == 30
    assert not source.bad_rows
    assert len(open_source(tmp_path / "*.tar").all) == len(open_source(tmp_path).all) == 30


def test_captions_in_json_and_keys_with_folders_and_dots(tmp_path):
    members = {
        "a/b.c/one.jpg": jpeg(0),
        "a/b.c/one.json": b'{"captions": ["x", "y"]}',
        "two.png.jpg": jpeg(1),
        "two.txt": b"z",
    }
    assert captions_by_image(open_source(write_tar(tmp_path / "s.tar", members), val_size=1)) == {
        "a/b.c/one.jpg": ["x", "y"],
        "two.png.jpg": ["z"],
    }


def test_files_that_macos_adds_are_skipped_and_a_repeated_key_is_another_pair(tmp_path):
    members = {
        name: data for key, value in pair_members(0, 3).items() for name, data in ((f"._{key}", b"mac"), (key, value))
    }
    assert not open_source(write_tar(tmp_path / "mac.tar", members), val_size=1).bad_rows
    twice = tmp_path / "twice.tar"
    with tarfile.open(twice, "w") as file:
        for i in (0, 1, 1):
            for name, data in (("x.jpg", jpeg(i)), ("x.txt", b"scene")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    assert len(open_source(twice, val_size=1).all) == 3


def test_pairs_without_image_or_caption_are_listed(tmp_path):
    members = pair_members(0, 6)
    del members["000000001.jpg"], members["000000002.txt"], members["000000002.json"]
    members["000000003.json"] = b"{broken"  # its .txt is intact
    assert bad_rows(open_source(write_tar(tmp_path / "s.tar", members), val_size=1)) == {
        ("missing file", "s.tar: 000000001"),
        ("no caption", "s.tar: 000000002.jpg"),
    }


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.62, 0.8])
def test_a_truncated_shard_gives_its_complete_pairs(tmp_path, part):
    write_tar(tmp_path / "0.tar", pair_members(0, 10))
    truncated = write_tar(tmp_path / "1.tar", pair_members(10, 10))
    truncated.write_bytes(truncated.read_bytes()[: int(truncated.stat().st_size * part)])
    source = open_source(tmp_path / "{0..1}.tar")
    assert 10 <= len(source.all) < 20
    assert source.bad_rows.counts["truncated"] >= 1
    for i in range(len(source.all)):
        source.all.image(i)


HOSTILE = {
    "points outside": {"name": "../../etc/cron.jpg"},
    "points outside the archive": {"name": "/etc/passwd.jpg"},
    "is a link to": {"name": "a.jpg", "type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "link to '/etc": {"name": "a.jpg", "type": tarfile.LNKTYPE, "linkname": "/etc/passwd"},
    "is not a regular file": {"name": "a.jpg", "type": tarfile.CHRTYPE},
    "a pickle": {"name": "a.pkl"},
    "pickle, which can run code": {"name": "a.emb.npy"},
}


@pytest.mark.parametrize("words", HOSTILE)
def test_a_hostile_shard_is_refused(tmp_path, words):
    with tarfile.open(tmp_path / "s.tar", "w") as file:
        for name, data in pair_members(0, 2).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
        info = tarfile.TarInfo()
        for key, value in HOSTILE[words].items():
            setattr(info, key, value)
        file.addfile(info, io.BytesIO(b""))
    with pytest.raises(ValueError, match=f"s.tar is refused.*{words}"):
        open_source(tmp_path / "s.tar")


@pytest.mark.parametrize(("size", "first"), [(-512, False), (-5, False), (-1024, False), (-512, True), (-1024, True)])
def test_a_member_of_negative_size_is_refused(tmp_path, size, first):
    """Such a size once made tarfile loop for ever (CVE-2025-8194)."""
    path = write_tar(tmp_path / "s.tar", pair_members(0, 2))
    with tarfile.open(path) as file:
        end = 0 if first else file.getmembers()[3].offset
    info = tarfile.TarInfo("evil.jpg")
    info.size = size
    whole = path.read_bytes()
    path.write_bytes(whole[:end] + info.tobuf(tarfile.GNU_FORMAT) + whole[end:])
    with pytest.raises(ValueError, match=r"invalid|not an uncompressed tar"):
        open_source(path)


def test_a_compressed_shard_is_refused(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w:gz") as file:
        file.addfile(tarfile.TarInfo("a.jpg"))
    with pytest.raises(ValueError, match="not an uncompressed tar"):
        open_source(tmp_path / "s.tar")


def test_missing_shards_are_counted(tmp_path):
    write_tar(tmp_path / "0.tar", pair_members(0, 3))
    with pytest.raises(FileNotFoundError, match=r"2 of 3 shards are missing, such as .*1\.tar"):
        open_source(tmp_path / "{0..2}.tar")


def test_links_out_of_the_folder_are_refused_unless_allowed(tmp_path):
    write_photos(tmp_path / "elsewhere", 2)
    write_photos(tmp_path / "set" / "cat", 3, start=10)
    os.symlink(tmp_path / "elsewhere" / "0000.jpg", tmp_path / "set" / "cat" / "out.jpg")
    os.symlink(tmp_path / "set" / "cat" / "0010.jpg", tmp_path / "set" / "cat" / "within.jpg")
    os.symlink(tmp_path / "elsewhere", tmp_path / "set" / "dog")
    refused = open_source(tmp_path / "set", val_size=1, caption_from="folder")
    assert bad_rows(refused) == {("refused", "out.jpg"), ("refused", "dog")}
    assert "cat/within.jpg" in captions_by_image(refused)
    table = tmp_path / "set" / "t.csv"
    table.write_text("image,caption\ndog/0001.jpg,a dog\ncat/0010.jpg,a cat\ncat/0011.jpg,x")
    assert bad_rows(open_source(table, val_size=1)) == {("refused", "t.csv line 2")}
    table.unlink()
    os.symlink(tmp_path / "set", tmp_path / "set" / "circle")
    os.symlink(tmp_path / "set", tmp_path / "set" / "cat" / "circle")
    assert {"cat/out.jpg", "dog/0001.jpg"} <= captions_by_image(
        open_source(tmp_path / "set", val_size=1, allow=("links",))
    ).keys()


@pytest.fixture
def server(tmp_path):
    """Serves tmp_path/web; /away.jpg redirects to a local file, /short.jpg is cut off."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "web"))

        def do_GET(self):
            if self.path == "/away.jpg":
                self.send_response(302)
                self.send_header("Location", "file:///etc/passwd")
                self.end_headers()
            elif self.path == "/short.jpg":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"x")
            else:
                super().do_GET()

        def log_message(self, *args):
            pass

    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()


def test_urls_are_refused_unless_allowed(tmp_path, server, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    images = write_photos(tmp_path / "web", 4)
    rows = [
        *(f"{server}/{name},scene" for name in images),
        f"{server}/gone.jpg,scene",
        f"{server}/away.jpg,scene",
        f"{server}/short.jpg,scene",
        "ftp://x/y.jpg,s",
    ]
    (tmp_path / "t.csv").write_text("url,caption\n" + "\n".join(rows))
    with pytest.raises(ValueError, match=r"is a URL; --allow urls downloads it"):
        open_source(tmp_path / "t.csv")
    source = open_source(tmp_path / "t.csv", val_size=1, allow=("urls",))
    assert bad_rows(source) == {("refused", "t.csv line 9")}
    assert source.all.read(2) == jpeg(2)
    for row, reason in ((4, "answers 404"), (5, "unsupported protocol"), (6, "received 1 bytes, expected 1000")):
        with pytest.raises(ValueError, match=reason):
            source.all.read(row)
