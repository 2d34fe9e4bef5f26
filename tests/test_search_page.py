"""The server of the search page: what it answers, to whom, and what it refuses. The page: test_search_browser.py."""

import hashlib
import io
import os
import re
import struct
import threading
import zlib
from datetime import date

import httpx2 as httpx
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from starlette.testclient import TestClient

from helpers import run_in_thread
from image_library import add_odd_name, build_index, calibrate_between, open_plain, open_shared, write_library
from m1clip.onnx_model import load_onnx
from m1clip.search import shared, thumbnails, web
from m1clip.search.catalog import Catalog
from m1clip.search.query import Library, Searcher, parse_query
from m1clip.web.server import create_server
from onnx_export import export_tiny, tiny_clip
from photos import jpeg

TOKEN = "a-Secret"
IMAGES = 24  # in 25 files
ERRORS = (checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return export_tiny(tiny_clip(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_library(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def library(model, folder):
    return open_shared(model, folder)


@pytest.fixture(scope="module")
def client(library):
    return client_of(library)


@pytest.fixture
def own_library(model, tmp_path):
    """A library whose files a test may change."""
    return open_shared(model, write_library(tmp_path))


def client_of(library, token=None, address="http://127.0.0.1:8265"):
    app = web.create_search_app(library, token, lambda: 0.0)
    return TestClient(app, base_url=address, follow_redirects=False, raise_server_exceptions=True)


def search(client, **parameters):
    response = client.get("/api/search", params={"top_k": 100, **parameters})
    assert response.status_code == 200, response.text
    return response.json()


def names(answer):
    return [result["name"] for result in answer["results"]]


def find(client, name):
    return next(result for result in search(client)["results"] if result["name"] == name)


def pixels_of(response):
    return Image.open(io.BytesIO(response.content))


@pytest.mark.parametrize("query", ["a cat", "cat + 0.5 * dog", 'a - "b - c"', "zebra"])
def test_a_text_finds_the_images_that_the_command_finds(model, library, client, query):
    plain = Library(library.index, library.folder)
    expected = Searcher(load_onnx(model), plain).search(parse_query(query), top_k=100)
    answer = search(client, q=query)
    assert [result["row"] for result in answer["results"]] == [hit.file.row for hit in expected.hits]
    scores = [result["score"] for result in answer["results"]]
    assert scores == pytest.approx([hit.score for hit in expected.hits], abs=1e-5)
    assert (answer["images"], answer["is_nothing"]) == (IMAGES, False)


def test_results_go_on_from_an_offset(client):
    all_results = search(client, q="a cat")["results"]
    parts = [search(client, q="a cat", offset=start, top_k=7)["results"] for start in range(0, 28, 7)]
    assert [result for part in parts for result in part] == all_results
    assert search(client, q="a cat", offset=1000)["results"] == []


def test_without_a_query_the_newest_come_first(client):
    answer = search(client)
    dates = [result["date"] for result in answer["results"]]
    assert dates == sorted(dates, reverse=True)
    assert dates[0] == "2024-05-20T12:00:00"
    assert {result["score"] for result in answer["results"]} == {None}


def test_a_row_and_an_upload_find_images_like_them(library, client, folder):
    result, data = find(client, "cats/03.jpg"), (folder / "cats" / "03.jpg").read_bytes()
    row = library.catalog.library.vectors_RE[result["row"]]
    by_row, by_upload = search(client, like=result["row"]), client.post("/api/search?top_k=100", content=data).json()
    assert result["row"] not in [other["row"] for other in by_row["results"]]
    assert by_upload["results"][0]["row"] == result["row"]
    for other in by_row["results"]:
        assert other["score"] == pytest.approx(library.catalog.library.vectors_RE[other["row"]] @ row, abs=1e-5)


def test_words_are_added_to_an_image(model, library, client):
    row, loaded = find(client, "cats/03.jpg")["row"], load_onnx(model)
    vectors = library.catalog.library.vectors_RE
    query_E = vectors[row] - 0.5 * loaded.encode_text("dog")[0] + loaded.encode_text("cat")[0]
    expected = vectors @ (query_E / np.linalg.norm(query_E))
    for result in search(client, like=row, q="cat - 0.5 * dog")["results"]:
        assert result["score"] == pytest.approx(expected[result["row"]], abs=1e-5)


def test_folders_and_dates_filter_the_results(client, folder):
    every = {result["name"]: result["date"][:10] for result in search(client)["results"]}
    in_cats = {f"cats/{path.name}" for path in (folder / "cats").iterdir()}
    assert set(names(search(client, folder="cats"))) == in_cats
    assert set(names(search(client, folder="dogs"))) == set(names(search(client, folder="dogs/big")))
    days = {"from": "2023-05-03", "to": "2024-05-12"}
    expected = {name for name, day in every.items() if days["from"] <= day <= days["to"]}
    assert set(names(search(client, q="a cat", **days))) == expected
    assert search(client, q="a", folder="cats", **days)["images"] == len(expected & in_cats)
    assert search(client, q="a", **{"from": "2030-01-01"}) == {"images": 0, "is_nothing": False, "results": []}


def test_a_copy_is_one_result_and_named_by_the_folder_that_is_searched(client):
    assert find(client, "0030.jpg")["copies"] == ["cats/copy.jpg"]
    (result,) = [result for result in search(client, folder="cats")["results"] if result["copies"]]
    assert (result["name"], result["copies"]) == ("cats/copy.jpg", ["0030.jpg"])


def test_the_library_is_described(client, folder, model):
    facts = client.get("/api/library").json()
    assert (facts["folder"], facts["images"], facts["model"]) == (folder.name, IMAGES, model.name)
    assert facts["folders"] == [
        {"name": "cats", "files": 11},
        {"name": "dogs", "files": 10},
        {"name": "dogs/big", "files": 10},
    ]
    assert (facts["first"], facts["last"]) == ("2019-12-22", "2024-05-20")


def test_of_too_many_folders_the_deepest_are_left_out(library, monkeypatch):
    monkeypatch.setattr(shared, "MAX_FOLDERS", 2)
    assert [folder.name for folder in shared.list_folders(library.catalog)] == ["cats", "dogs"]


def test_the_filters_are_those_of_a_loop_over_the_files(library):
    catalog = library.catalog
    days = (date(2023, 5, 2), date(2024, 5, 14))
    for folder in ("", "cats", "dogs", "dogs/big"):
        selected = catalog.select(folder, *days)
        for file, is_selected in enumerate(selected):
            is_inside = catalog.name(file).startswith(folder + "/" if folder else "")
            assert is_selected == (is_inside and days[0] <= catalog.date_of(file).date() <= days[1])


def test_nothing_like_it_is_said_and_the_nearest_are_there(model, folder, tmp_path):
    low, high = calibrate_between(model, open_plain(model, folder), ("a cat", "x"), tmp_path / "model")
    client = client_of(open_shared(tmp_path / "model", folder))
    assert search(client, q=low)["is_nothing"]
    assert search(client, q=low)["results"]
    assert not search(client, q=high)["is_nothing"]
    assert not search(client, q=low, like=0)["is_nothing"]  # images are not calibrated


# Images


def test_thumbnails_are_small_upright_and_cached_for_ever(client):
    for result in search(client)["results"]:
        response = client.get(f"/api/thumbnail/{result['row']}", params={"v": result["version"]})
        assert response.headers["content-type"] == "image/jpeg"
        assert "immutable" in response.headers["cache-control"]
        image = pixels_of(response)
        assert image.format == "JPEG"
        assert image.size == (result["width"], result["height"])  # none is larger than 320
    assert (find(client, "turned.jpg")["width"], find(client, "turned.jpg")["height"]) == (48, 64)


def test_a_large_image_has_a_thumbnail_of_320_pixels(model, tmp_path):
    Image.effect_noise((1000, 400), 50).convert("RGB").save(tmp_path / "large.png")
    library = open_shared(model, tmp_path)
    row = library.catalog.library.rows_N[0]
    response = client_of(library).get(f"/api/thumbnail/{row}")
    assert pixels_of(response).size == (320, 128)
    assert response.headers["cache-control"] == "no-cache"  # an address without a version


def test_a_thumbnail_is_made_once(own_library, monkeypatch):
    client, made = client_of(own_library), []
    row = find(client, "cats/01.jpg")["row"]
    monkeypatch.setattr(shared, "make_thumbnail", lambda *args: made.append(args) or thumbnails.make_thumbnail(*args))
    own_library.thumbnails.database.execute("DELETE FROM thumbnail")
    first, second = (client.get(f"/api/thumbnail/{row}").content for _ in range(2))
    assert first == second
    assert len(made) == 1


def test_the_cache_of_thumbnails_forgets_the_oldest(tmp_path):
    cache = thumbnails.ThumbnailCache(tmp_path / "t.sqlite", max_bytes=300_000)
    for number in range(200):
        cache.put(number.to_bytes(16), 320, bytes(5_000))
    kept = [number for number in range(200) if cache.get(number.to_bytes(16), 320)]
    assert kept == list(range(kept[0], 200))
    assert 30 <= len(kept) <= 60
    assert (tmp_path / "t.sqlite").stat().st_size < 500_000


def test_a_damaged_cache_of_thumbnails_is_made_again(tmp_path):
    path = tmp_path / "t.sqlite"
    path.write_bytes(b"no database" * 1000)
    cache = thumbnails.ThumbnailCache(path)
    cache.put(b"x" * 16, 320, b"jpeg")
    assert thumbnails.ThumbnailCache(path).get(b"x" * 16, 320) == b"jpeg"
    (tmp_path / "folder.sqlite").mkdir()
    unusable = thumbnails.ThumbnailCache(tmp_path / "folder.sqlite")
    unusable.put(b"x" * 16, 320, b"jpeg")
    assert unusable.get(b"x" * 16, 320) == b"jpeg"


def test_an_image_is_the_file_itself_where_browsers_show_it(client, folder):
    for name in ("cats/03.jpg", "turned.jpg"):
        response = client.get(f"/api/image/{find(client, name)['row']}")
        assert response.content == (folder / name).read_bytes()
        assert response.headers["content-type"] == "image/jpeg"
        assert response.headers["x-content-type-options"] == "nosniff"
    scan = client.get(f"/api/image/{find(client, 'scan.tiff')['row']}")
    assert (scan.headers["content-type"], pixels_of(scan).size) == ("image/jpeg", (48, 48))
    assert scan.headers["content-disposition"] == "inline; filename*=UTF-8''scan.jpg"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "AVIF"])
def test_other_formats_are_turned_because_not_all_browsers_do(kind):
    upright, turned, exif = io.BytesIO(), io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGB", (40, 20), "red")
    image.save(upright, kind)
    image.save(turned, kind, exif=exif)
    path = thumbnails.Path(f"x.{kind.lower()}")
    assert thumbnails.full_image(path, upright.getvalue()) == (upright.getvalue(), f"image/{kind.lower()}")
    data, media_type = thumbnails.full_image(path, turned.getvalue())
    assert (media_type, Image.open(io.BytesIO(data)).size) == ("image/jpeg", (20, 40))


@pytest.mark.parametrize("path", ["/api/thumbnail/{}", "/api/image/{}"])
def test_a_file_that_is_gone_or_changed_is_not_served(own_library, path):
    client = client_of(own_library)
    gone, changed, copied = (find(client, name) for name in ("cats/03.jpg", "cats/05.jpg", "0030.jpg"))
    addresses = [path.format(result["row"]) for result in (gone, changed, copied)]
    assert {client.get(address).status_code for address in addresses} == {200}
    (own_library.folder / "cats/03.jpg").unlink()
    (own_library.folder / "cats/05.jpg").write_bytes(jpeg(77))
    (own_library.folder / "0030.jpg").unlink()
    answers = [client.get(address) for address in addresses]
    assert [answer.status_code for answer in answers] == [404, 404, 200]  # of the last one there is a copy
    assert "gone or has changed" in answers[0].json()["detail"]


def test_a_link_in_place_of_a_file_does_not_lead_elsewhere(own_library, tmp_path_factory):
    client, secret = client_of(own_library), tmp_path_factory.mktemp("other") / "secret.jpg"
    secret.write_bytes(jpeg(78))
    row = find(client, "cats/03.jpg")["row"]
    (own_library.folder / "cats/03.jpg").unlink()
    (own_library.folder / "cats/03.jpg").symlink_to(secret)
    assert client.get(f"/api/image/{row}").status_code == 404
    assert client.get(f"/api/thumbnail/{row}").status_code == 404


def test_only_rows_of_the_library_are_served(model, folder, tmp_path):
    """The index has images of other folders, too."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "private.jpg").write_bytes(jpeg(90))
    private = int(open_shared(model, other).catalog.library.rows_N[0])
    client = client_of(open_shared(model, folder))
    for path in (f"/api/image/{private}", f"/api/thumbnail/{private}", f"/api/search?like={private}"):
        assert client.get(path).status_code == 404, path
    assert client.get("/api/thumbnail/999999999").status_code == 404


@pytest.mark.parametrize("row", ["%2e%2e", "cats%2f01.jpg", "..%2f..%2fetc%2fpasswd", "-1", "1.5", "1e3", "%00"])
def test_no_path_reaches_the_files(client, row):
    for kind in ("image", "thumbnail"):
        assert client.get(f"/api/{kind}/{row}").status_code in (404, 422)
    assert client.get(f"/{row}").status_code == 404


def test_an_image_of_another_version_is_not_served(client):
    result = find(client, "cats/03.jpg")
    other = "0" * 16
    assert client.get(f"/api/thumbnail/{result['row']}?v={other}").status_code == 404
    assert client.get(f"/api/image/{result['row']}?v={result['version']}").status_code == 200


def test_names_are_text_whatever_their_bytes_are(model, tmp_path):
    write_library(tmp_path)
    odd = add_odd_name(tmp_path)
    client = client_of(open_shared(model, tmp_path))
    shown = names(search(client, q="a cat"))
    assert "<img src=x onerror=alert(1)>.jpg" in shown
    assert odd is None or "��.jpg" in shown
    for result in search(client)["results"]:
        assert client.get(f"/api/image/{result['row']}").status_code == 200


# Changes


def test_what_another_process_indexes_appears(own_library, model):
    now = [0.0]
    own_library.clock = lambda: now[0]
    own_library.checked_at = own_library.next_load = 0.0
    client = client_of(own_library)
    (own_library.folder / "new.jpg").write_bytes(jpeg(60))
    (own_library.folder / "cats/03.jpg").unlink()
    build_index(model, own_library.folder)
    assert "new.jpg" not in names(search(client))
    now[0] = 2.0
    assert "new.jpg" in names(search(client))
    assert "cats/03.jpg" not in names(search(client))


def test_loading_again_takes_a_small_share_of_the_time(own_library, monkeypatch):
    now, loads = [0.0], []

    def load_slowly(library):
        loads.append(now[0])
        now[0] += 2.0
        return Catalog(library)

    monkeypatch.setattr(shared, "Catalog", load_slowly)
    monkeypatch.setattr(shared, "LOADS", 1)
    own_library.clock, own_library.checked_at, own_library.next_load = lambda: now[0], 0.0, 0.0
    while now[0] < 100:
        own_library.version = None  # it has changed again
        own_library.current()
        now[0] += 0.5
    assert len(loads) == 5


def test_an_empty_library_is_no_error(own_library):
    client = client_of(own_library)
    for file in own_library.folder.rglob("*.*"):
        file.unlink()
    paths = list(own_library.index.files_below(own_library.folder))
    own_library.index.remove_files(paths)
    own_library.load()
    assert client.get("/api/library").json()["images"] == 0
    for query in ("", "a cat"):
        assert search(client, q=query) == {"images": 0, "is_nothing": False, "results": []}


# Bad input


BAD_QUERIES = {
    "an operator without text": ({"q": "a + "}, 400),
    "nothing to look for": ({"q": "0 * cat"}, 400),
    "a weight of a thousand digits": ({"q": f"{'9' * 1000} * cat"}, 400),
    "terms that cancel each other": ({"q": "cat - cat"}, 400),
    "a text that is too long": ({"q": "x" * 10_001}, 422),
    "a folder that is none": ({"folder": "../.."}, 404),
    "a day that is none": ({"from": "2023-02-30"}, 400),
    "a date in another form": ({"to": "1.2.2023"}, 422),
    "too many results": ({"top_k": "201"}, 422),
    "a negative offset": ({"offset": "-1"}, 422),
    "a row that is no number": ({"like": "a"}, 422),
    "a row beyond all": ({"like": str(2**53)}, 404),
    "a row of many digits": ({"like": "9" * 500}, 422),
}


@pytest.mark.parametrize("kind", BAD_QUERIES)
def test_a_bad_query_is_one_sentence(client, kind):
    parameters, status = BAD_QUERIES[kind]
    response = client.get("/api/search", params=parameters)
    assert response.status_code == status
    assert isinstance(response.json()["detail"], str)
    assert "\n" not in response.json()["detail"]


@pytest.mark.parametrize(
    "text", ["\x00", "\ud800".encode("utf-8", "surrogatepass"), b"\xff", "🦊" * 300, "<|endoftext|>", "&#0;"]
)
def test_any_text_is_answered(client, text):
    assert client.get("/api/search", params={"q": text}).status_code in (200, 400)


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"x" * 1000, jpeg(1)[:200], b"%PDF-1.4", b"<svg xmlns='a'/>"])
def test_an_upload_that_is_no_image_is_refused(client, data):
    response = client.post("/api/search", content=data)
    assert response.status_code == 400
    assert response.json()["detail"].startswith("this image cannot be used")


def test_an_upload_is_bounded_with_and_without_its_length(client, monkeypatch):
    monkeypatch.setattr(web, "MAX_UPLOAD", 1000)
    parts = iter([b"x" * 600, b"x" * 600])
    for content in (b"x" * 1001, parts):
        response = client.post("/api/search", content=content)
        assert response.status_code == 413
    assert client.post("/api/search", content=b"x", headers={"content-length": "9" * 30}).status_code == 413


def test_a_decompression_bomb_is_refused(client):
    header = b"IHDR" + struct.pack(">II5B", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(header) - 4) + header + struct.pack(">I", zlib.crc32(header))
    response = client.post("/api/search", content=b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\x01IDAT")
    assert response.status_code == 400
    assert "decompression bomb" in response.json()["detail"]


# Who may ask


def test_other_hosts_other_sites_and_missing_tokens_are_refused(library):
    client, secured = client_of(library), client_of(library, TOKEN, "http://laptop:8265")
    for path in ("/api/search?q=a", "/api/library", "/api/thumbnail/0", "/api/image/0"):
        assert client.get(path, headers={"host": "evil.example"}).status_code == 421, path
        assert client.get(path, headers={"sec-fetch-site": "cross-site"}).status_code == 403, path
        assert secured.get(path).status_code == 401, path
        assert secured.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code in (200, 404), path
    assert client.post("/api/search", content=jpeg(1), headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert secured.post("/api/search", content=jpeg(1)).status_code == 401


def test_a_token_becomes_a_cookie_that_images_need(library):
    client = client_of(library, TOKEN, "http://laptop:8265")
    row = library.catalog.library.rows_N[0]
    assert client.get(f"/?token={TOKEN}").status_code == 303
    assert client.get(f"/api/thumbnail/{row}").status_code == 200


def test_the_page_loads_nothing_from_other_hosts(client):
    for name in ("", "page.js", "viewer.js", "source.js", "page.css", "base.css", "elements.js"):
        answer = client.get(f"/{name}")
        assert answer.status_code == 200, name
        assert not re.search(r"https?://(?!localhost)", answer.text), name
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    for name in ("web.py", "..%2fweb.py", "static_page/source.js"):
        assert client.get(f"/{name}").status_code == 404


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE"])
def test_the_api_answers_only_its_methods(client, method):
    for path in ("/api/library", "/api/search", "/api/thumbnail/0", "/api/image/0"):
        assert client.request(method, path).status_code == 405, path


def operations():
    return [("/api/library", "GET"), ("/api/search", "GET"), ("/api/search", "POST"), ("/api/thumbnail/{row}", "GET")]


@pytest.mark.parametrize(("path", "method"), [*operations(), ("/api/image/{row}", "GET")])
def test_every_answer_conforms_to_the_published_schema(library, path, method):
    """Requests that schemathesis generates from the schema, valid and invalid."""
    headers = {"host": "127.0.0.1"}
    app = web.create_search_app(library)
    operation = schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)[path][method]
    modes = list(GenerationMode) if operation.query or operation.path_parameters else [GenerationMode.POSITIVE]
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

    @seed(0)
    @settings(
        max_examples=25, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=cases)
    def check(case):
        response = case.call(headers=headers)
        case.validate_response(response, checks=[not_a_server_error, *ERRORS], headers=headers)

    check()


def test_many_requests_at_once_are_all_answered(library):
    rows, statuses = library.catalog.library.rows_N.tolist(), []
    with run_in_thread(create_server(web.create_search_app(library))) as address:

        def ask(number):
            path = f"thumbnail/{rows[number % len(rows)]}" if number % 2 else f"search?q=cat%20{number}"
            statuses.append(httpx.get(f"{address}api/{path}", timeout=120).status_code)

        threads = [threading.Thread(target=ask, args=[number]) for number in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert statuses == [200] * 60


def test_the_hash_of_a_file_is_that_of_the_index(folder, library):
    """Thumbnails are kept by it, and files are compared with it."""
    catalog = library.catalog
    for position in range(len(catalog)):
        data = catalog.path(catalog.files(position)[0]).read_bytes()
        assert catalog.contents[position] == hashlib.blake2b(data, digest_size=16).digest()
        assert os.path.relpath(catalog.path(catalog.files(position)[0]), folder) == catalog.name(
            catalog.files(position)[0]
        )
