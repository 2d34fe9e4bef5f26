"""The search page in a real Chromium: served by m1clip, and as a static folder by Python's own web server."""

import base64
import functools
import json
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from browser import Visit
from helpers import QuietConsole, run_in_thread
from image_library import calibrate_between, open_plain, open_shared, write_library
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.onnx_model import load_onnx
from m1clip.search import browser_runtime, static, web
from m1clip.search.query import Searcher, parse_query
from m1clip.web.server import create_server
from onnx_export import export_tiny, tiny_clip, write_export
from photos import jpeg

pytestmark = pytest.mark.slow
CAPTIONS = ["a cat on a sofa", "two dogs in the snow", "a red car in the street", "über den Dächern"] * 20
QUERIES = [
    "a cat",
    "dog - snow",
    'cat + 0.5 * "red car"',
    "Ein Café über&amp;der Straße",
    "2 * dog - 'a + b'",
    "cat " * 40,
]
PHONE = {"width": 390, "height": 844, "is_mobile": True, "has_touch": True}
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed, and fetches the runtime")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """With BPE, and a threshold that the two best texts of a sample exceed."""
    clip = CLIP(tiny_clip().config, Tokenizer.train_bpe(CAPTIONS, 400)).eval()
    return export_tiny(clip, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_library(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def own_folder(tmp_path) -> Path:
    return write_library(tmp_path / "photos")


@contextmanager
def serve(model, folder):
    with run_in_thread(create_server(web.create_search_app(open_shared(model, folder)))) as address:
        yield address


@pytest.fixture(scope="module")
def address(model, folder):
    with serve(model, folder) as address:
        yield address


def expected_names(model, folder, query):
    """What the command finds, relative to the folder."""
    library = open_plain(model, folder)
    answer = Searcher(load_onnx(model), library).search(parse_query(query), top_k=100, min_score=-1.0)
    return [str(hit.file.path.relative_to(library.folder)) for hit in answer.hits]


class Search(Visit):
    """The search page, after its first results."""

    def __init__(self, chromium, address, **options):
        super().__init__(chromium, address, **options)
        self.page.wait_for_selector("#results li")

    def names(self):
        code = "tiles => tiles.map((tile) => tile.title.split('\\n')[0])"
        return self.page.locator("#results li").evaluate_all(code)

    def find(self, query):
        """The names of the results, once they are those of this query."""
        self.page.fill("#query", query)
        self.wait_idle()
        return self.names()

    def wait_idle(self):
        self.page.wait_for_timeout(200)  # typing has ended
        self.page.wait_for_selector("#results[aria-busy=false]", state="attached")

    def shown(self):
        return self.page.text_content("#file-name")

    def close(self):
        assert self.errors == []
        self.page.close()


@pytest.fixture
def visit(chromium, address):
    visit = Search(chromium, address)
    yield visit
    visit.close()


@pytest.mark.parametrize("query", QUERIES[:3])
def test_typing_finds_what_the_command_finds(visit, model, folder, query):
    page = visit.page
    assert page.evaluate("document.activeElement.id") == "query"
    page.keyboard.type(query)
    visit.wait_idle()
    assert visit.names() == expected_names(model, folder, query)
    assert page.text_content("#status") == "24 images, best first"
    assert page.is_hidden("#examples")


def test_an_answer_that_comes_late_is_dropped(chromium, address, model, folder):
    visit = Search(chromium, address)
    visit.page.route(re.compile(r"search\?.*q=slow"), lambda route: visit.held.append(route))
    visit.page.fill("#query", "slow")
    visit.wait_until(lambda: visit.held)
    names = visit.find("a cat")
    visit.release()
    visit.page.wait_for_timeout(500)
    assert visit.names() == names == expected_names(model, folder, "a cat")
    visit.close()


def test_an_operator_at_the_end_is_no_error_while_typing(visit):
    names = visit.find("cat")
    assert visit.find("cat + ") == names
    visit.page.fill("#query", "cat - cat")
    visit.page.wait_for_selector("#error >> text=cancel each other")
    visit.errors.clear()  # Chromium logs the status 400
    assert visit.find("cat") == names
    assert visit.page.is_hidden("#error")


def test_examples_are_queries(visit):
    visit.page.click("#examples button >> nth=0")
    visit.wait_idle()
    assert visit.page.input_value("#query") == visit.page.evaluate("new URLSearchParams(location.search).get('q')")
    assert visit.page.text_content(".score").strip()


def test_names_of_files_are_text(visit):
    assert "<img src=x onerror=alert(1)>.jpg" in visit.find("a cat")
    assert visit.page.locator("#results img[src='x']").count() == 0


def test_all_thumbnails_are_loaded_in_the_shape_that_was_reserved(visit):
    page = visit.page
    before = page.locator("#results li").evaluate_all("tiles => tiles.map((tile) => tile.getBoundingClientRect().top)")
    for tile in page.locator("#results li").all():
        tile.scroll_into_view_if_needed()
    loaded = "[...document.querySelectorAll('.thumb img')].every((image) => image.complete && image.naturalWidth)"
    visit.wait_until(lambda: page.evaluate(loaded))
    page.evaluate("scrollTo(0, 0)")
    after = page.locator("#results li").evaluate_all("tiles => tiles.map((tile) => tile.getBoundingClientRect().top)")
    assert after == before
    shapes = page.locator(".thumb").evaluate_all("all => all.map((one) => one.clientWidth / one.clientHeight)")
    images = page.locator(".thumb img").evaluate_all("all => all.map((one) => one.naturalWidth / one.naturalHeight)")
    assert shapes == pytest.approx(images, rel=0.05)


def test_more_results_are_fetched_by_scrolling_and_back_returns_to_them(chromium, model, tmp_path):
    for number in range(100):
        (tmp_path / f"{number:03d}.jpg").write_bytes(jpeg(number))
    with serve(model, tmp_path) as address:
        visit = Search(chromium, address, height=600)
        page = visit.page
        assert len(visit.find("a cat")) == 60
        page.route("**/api/search*", lambda route: route.abort())
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.wait_for_selector("#error >> text=The server does not answer")
        assert len(visit.names()) == 60  # an error takes nothing away
        visit.release()
        visit.errors.clear()  # Chromium logs the failed request
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(200)
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        visit.wait_until(lambda: len(visit.names()) == 100)
        assert page.is_hidden("#error")
        names, top = visit.names(), page.evaluate("scrollY")
        assert names == expected_names(model, tmp_path, "a cat")
        page.locator(".similar").last.dispatch_event("click")
        visit.wait_until(lambda: visit.names() != names)
        assert page.evaluate("scrollY") == 0
        page.go_back()
        visit.wait_until(lambda: (visit.names(), page.evaluate("scrollY")) == (names, top))
        visit.close()


def drop_file(page, data, name="photo.jpg", kind="image/jpeg"):
    """Drag a file over the page, and drop it."""
    code = """([data, name, type]) => {
      const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)), transfer = new DataTransfer();
      transfer.items.add(new File([bytes], name, {type}));
      return transfer; }"""
    transfer = page.evaluate_handle(code, [base64.b64encode(data).decode(), name, kind])
    for event, is_shown in (("dragenter", True), ("dragleave", False), ("dragover", True)):
        page.dispatch_event("body", event, {"dataTransfer": transfer})
        assert page.is_visible("#drop") == is_shown
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    assert page.is_hidden("#drop")


def test_an_image_that_is_dropped_finds_itself_and_words_are_added(visit, folder):
    page = visit.page
    drop_file(page, (folder / "cats" / "05.jpg").read_bytes())
    visit.wait_until(lambda: visit.names()[0] == "cats/05.jpg")
    assert page.is_visible("#example")
    assert page.locator(".score").first.text_content() == "1.000"
    names = visit.names()
    assert visit.find("zebra") != names
    assert "q=zebra" in page.url
    page.fill("#query", "")
    visit.wait_until(lambda: visit.names() == names)
    page.click("#forget")
    visit.wait_until(lambda: "newest first" in page.text_content("#status"))
    page.go_back()
    visit.wait_until(lambda: visit.names() == names)  # this entry of the history has the image


def test_an_image_is_chosen_or_pasted(visit, folder):
    page = visit.page
    page.set_input_files("#file", folder / "cats" / "07.jpg")
    visit.wait_until(lambda: visit.names()[0] == "cats/07.jpg")
    data = base64.b64encode((folder / "cats" / "09.jpg").read_bytes()).decode()
    page.evaluate(
        """(data) => {
      const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)), clipboardData = new DataTransfer();
      clipboardData.items.add(new File([bytes], "p.jpg", {type: "image/jpeg"}));
      dispatchEvent(new ClipboardEvent("paste", {clipboardData})); }""",
        data,
    )
    visit.wait_until(lambda: visit.names()[0] == "cats/09.jpg")


def test_a_file_that_is_no_image_is_a_friendly_error(visit):
    drop_file(visit.page, b"text", "notes.txt", "text/plain")
    assert visit.page.text_content("#error") == "notes.txt is not an image."
    drop_file(visit.page, b"broken", "broken.jpg")
    visit.page.wait_for_selector("#error >> text=this image cannot be used")
    visit.errors.clear()  # Chromium logs the status 400


def test_more_like_this_searches_by_a_result(visit):
    page = visit.page
    page.hover("#results li >> nth=2")
    page.click("#results li >> nth=2 >> .similar")
    visit.wait_until(lambda: page.is_visible("#example"))
    visit.wait_idle()
    assert len(visit.names()) == 23  # all but itself
    assert re.search(r"\?like=\d+$", page.url)


def test_filters_select_folders_and_days(visit):
    page = visit.page
    assert page.locator("#folder option").all_text_contents()[1:] == ["cats (11)", "dogs (10)", "\u2003big (10)"]
    visit.find("a cat")
    page.select_option("#folder", "dogs/big")
    visit.wait_until(lambda: page.text_content("#status") == "10 images of 24, best first")
    assert all(name.startswith("dogs/big/") for name in visit.names())
    page.fill("#from", "2024-01-01")
    visit.wait_until(lambda: page.text_content("#status") == "5 images of 24, best first")
    page.fill("#to", "2024-05-13")
    visit.wait_until(lambda: page.text_content("#status") == "2 images of 24, best first")
    page.fill("#from", "2024-06-01")
    page.wait_for_selector("#status >> text=No image is in this folder and of these days")
    page.click("#clear")
    visit.wait_until(lambda: page.text_content("#status") == "24 images, best first")


def test_a_date_that_is_typed_is_one_entry_of_the_history(visit):
    before = visit.page.evaluate("history.length")
    visit.page.focus("#from")
    visit.page.keyboard.type("05172024")  # the year is 0002, 0020 and 0202 meanwhile
    visit.wait_until(lambda: "from=2024-05-17" in visit.page.url)
    assert visit.page.evaluate("history.length") == before + 1


def test_the_address_has_the_search_and_back_returns_to_the_last_one(visit, chromium, address):
    page = visit.page
    first = visit.find("a cat")
    page.keyboard.press("Enter")
    second = visit.find("zebra")
    page.select_option("#folder", "cats")
    visit.wait_until(lambda: len(visit.names()) == 11)
    assert "folder=cats" in page.url
    filtered = visit.names()
    other = Search(chromium, address + "?" + page.url.partition("?")[2])
    assert other.names() == filtered
    assert other.page.input_value("#query") == "zebra"
    other.close()
    page.go_back()
    visit.wait_until(lambda: visit.names() == second)
    page.go_back()
    visit.wait_until(lambda: visit.names() == first)
    assert page.input_value("#query") == "a cat"


def test_the_full_screen_view_is_operated_by_keys(visit):
    page = visit.page
    names = visit.find("a cat")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("#viewer[open]")
    assert visit.shown() == names[1]
    box = page.locator("#viewer").bounding_box()
    assert (box["width"], box["height"]) == (1300, 900)
    for key, index in (
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("ArrowLeft", 0),
        ("ArrowLeft", 0),
        ("End", 23),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert visit.shown() == names[index]
    page.keyboard.press("ArrowRight")
    visit.wait_until(lambda: "api/image/" in page.get_attribute("#full", "src"))
    page.keyboard.press("Escape")
    visit.wait_until(lambda: page.is_hidden("#viewer"))
    assert page.evaluate("document.activeElement.closest('li').title").startswith(names[1])
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "query"


def test_a_double_click_opens_or_closes_the_full_screen_view_once(visit):
    page = visit.page
    visit.find("a cat")
    page.dblclick(".thumb >> nth=0")
    page.wait_for_timeout(500)
    assert page.is_visible("#viewer")
    assert page.evaluate("document.activeElement.id") == "viewer"  # Enter presses no button
    page.dblclick("#close")
    page.wait_for_timeout(500)
    assert page.is_hidden("#viewer")
    assert page.input_value("#query") == "a cat"


def test_the_full_screen_view_describes_and_downloads_the_file(visit, folder):
    page = visit.page
    names = visit.find("a cat")
    page.click(f".thumb >> nth={names.index('cats/05.jpg')}")
    facts = page.text_content("#file-facts")
    assert "64 × 48" in facts
    assert "2023" in facts
    assert "cosine" in facts
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy")
    page.wait_for_selector("#copy >> text=copied")
    assert page.evaluate("navigator.clipboard.readText()") == "cats/05.jpg"
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "05.jpg"
    assert Path(download.value.path()).read_bytes() == (folder / "cats" / "05.jpg").read_bytes()
    page.keyboard.press("m")
    visit.wait_until(lambda: page.is_hidden("#viewer") and page.is_visible("#example"))


def test_back_closes_the_full_screen_view_and_keeps_the_search(visit):
    page = visit.page
    names = visit.find("a cat")
    page.click(".thumb >> nth=0")
    page.wait_for_selector("#viewer[open]")
    page.go_back()
    visit.wait_until(lambda: page.is_hidden("#viewer"))
    assert page.input_value("#query") == "a cat"
    assert visit.names() == names


def test_arrow_keys_move_through_rows_of_the_grid(visit):
    page = visit.page
    visit.find("a cat")
    rows = page.locator("#results li").evaluate_all(
        "all => all.map((one) => Math.round(one.getBoundingClientRect().top))"
    )
    index = "[...document.querySelectorAll('#results li')].indexOf(document.activeElement.closest('li'))"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    below = page.evaluate(index)
    assert rows[below] == sorted(set(rows))[1]
    page.keyboard.press("ArrowUp")
    assert page.evaluate(index) == 0
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.id") == "query"


def test_everything_has_an_accessible_name(visit):
    visit.find("a cat")
    code = """() => [...document.querySelectorAll("button, input, select, a[href]")]
      .filter((one) => one.checkVisibility())
      .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim()))
      .map((one) => one.outerHTML)"""
    assert visit.page.evaluate(code) == []
    label = visit.page.locator(".thumb").first.get_attribute("aria-label")
    assert re.search(r"cosine -?\d\.\d{3}", label)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(chromium, address, scheme):
    visit = Search(chromium, address, color_scheme=scheme, **PHONE)
    page = visit.page
    fits = "document.documentElement.scrollWidth <= innerWidth"
    visit.find("a cat")
    assert page.evaluate(fits)
    assert page.is_hidden("#filters")
    page.click("#show-filters")
    assert page.is_visible("#folder")
    assert page.evaluate(fits)
    page.tap(".thumb >> nth=0")
    page.wait_for_selector("#viewer[open]")
    assert page.evaluate(fits)
    assert page.locator("#caption").bounding_box()["y"] < 844
    page.tap("#next")
    page.tap("#close")
    visit.wait_until(lambda: page.is_hidden("#viewer"))
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]
    visit.close()


def test_a_file_that_is_gone_is_a_placeholder(chromium, model, own_folder):
    with serve(model, own_folder) as address:
        (own_folder / "cats" / "05.jpg").unlink()
        visit = Search(chromium, address)
        names = visit.find("a cat")
        tile = visit.page.locator("#results li").nth(names.index("cats/05.jpg"))
        tile.scroll_into_view_if_needed()
        tile.locator("text=cannot be loaded").wait_for()
        tile.locator(".thumb").click()
        visit.page.wait_for_selector("#missing >> text=Its file is gone or has changed")
        visit.page.close()


def test_a_server_that_has_ended_is_a_friendly_error(chromium, model, folder):
    with serve(model, folder) as address:
        visit = Search(chromium, address)
    visit.page.fill("#query", "a cat")
    visit.page.wait_for_selector("#error >> text=The server does not answer")
    visit.page.close()


@pytest.fixture(scope="module")
def calibrated(model, folder, tmp_path_factory):
    """A model that finds nothing like `low`, but something like `high`."""
    copy = tmp_path_factory.mktemp("calibrated") / "model"
    return copy, *calibrate_between(model, open_plain(model, folder), ("a cat", "dog", "snow", "car"), copy)


def check_nothing(visit, low, high):
    page = visit.page
    visit.find(low)
    assert page.text_content("#nothing-text") == f"Nothing like “{low}” among 24 images."
    assert page.is_hidden("#results")
    page.click("#nearest")
    assert page.is_visible("#results")
    assert page.text_content("#status") == "24 images, nothing like it; the nearest first"
    assert len(visit.names()) == 24
    visit.find(high)
    assert page.is_hidden("#nothing")
    assert page.is_visible("#results")


def test_nothing_like_it_offers_the_nearest(chromium, calibrated, folder):
    model, low, high = calibrated
    with serve(model, folder) as address:
        visit = Search(chromium, address)
        check_nothing(visit, low, high)
        visit.close()


def test_the_command_serves_the_page_with_a_token(chromium, model, folder):
    command = [sys.executable, "-m", "m1clip", "search", folder, "--model", model, "--web", "--port", "18565"]
    process = subprocess.Popen([*command, "--token", "auto"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = iter(process.stdout.readline, "")
    address = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
    visit = Search(chromium, address)
    assert "token" not in visit.page.url
    assert visit.find("a cat")
    visit.close()
    process.terminate()
    assert process.wait(120) == 0


# Static pages


@contextmanager
def host(folder):
    """A static host that says nothing of compression, of ranges or of COOP."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def runtime(tmp_path_factory):
    """Fetched once for all tests."""
    browser_runtime.browser_runtime(QuietConsole())


def write_page(model, folder, out, **options):
    console = QuietConsole()
    static.write_static(load_onnx(model), open_plain(model, folder), out, options.get("overwrite", False), console)
    return console


@pytest.fixture(scope="module")
def site(model, folder, runtime, tmp_path_factory):
    out = tmp_path_factory.mktemp("static") / "site"
    write_page(model, folder, out)
    return out


@pytest.fixture(scope="module")
def static_address(site):
    with host(site) as address:
        yield address


@pytest.fixture
def static_visit(chromium, static_address):
    visit = Search(chromium, static_address)
    yield visit
    visit.close()


@needs_npm
def test_a_static_page_finds_what_python_finds(static_visit, model, folder, site):
    """With the same INT8 encoder, the order is the same but for near ties."""
    shipped = static.with_text_encoder(load_onnx(model), site / "text_model.onnx")
    library = open_plain(model, folder)
    for query in QUERIES:
        expected = Searcher(shipped, library).search(parse_query(query), top_k=24, min_score=-1.0).hits
        score = {str(hit.file.path.relative_to(library.folder)): hit.score for hit in expected}
        names = static_visit.find(query)
        assert set(names) == set(score)
        assert names[0] == str(expected[0].file.path.relative_to(library.folder))
        found = [score[name] for name in names]
        assert found == pytest.approx(sorted(found, reverse=True), abs=0.01)
        shown = float(static_visit.page.locator(".score").first.text_content())
        assert shown == pytest.approx(expected[0].score, abs=0.01)


@needs_npm
@pytest.mark.parametrize("tokenizer", [None, Tokenizer.characters()], ids=["bpe", "characters"])
def test_token_ids_in_the_browser_are_those_of_python(chromium, tokenizer, model, folder, runtime, tmp_path):
    model = Path(shutil.copytree(model, tmp_path / "model"))
    if tokenizer:
        tokenizer.save(model / "tokenizer.json")
        write_export(tiny_clip(), model)
    write_page(model, folder, tmp_path / "site")
    texts = [
        *QUERIES,
        "猫 😀 and a dog",
        "it's 12:30 — don’t wait",
        "ﬁne &lt;b&gt; ΣΑΣ",
        " \u00a0x\ty\u3000 ",
        "<|endoftext|>",
        "Ä" * 50,
    ]
    code = """async (texts) => {
      const {QueryEncoder} = await import("./encoder.js"), {text} = await (await fetch("settings.json")).json();
      const encoder = new QueryEncoder(text, (path) => fetch(path));
      await encoder.load();
      return texts.map((each) => encoder.tokenize(each)); }"""
    with host(tmp_path / "site") as address:
        visit = Search(chromium, address)
        ids = visit.page.evaluate(code, texts)
        visit.close()
    loaded = load_onnx(model)
    assert ids == [list(each) for each in loaded.tokenizer.encode(texts, loaded.config.text.context_length)]


@needs_npm
def test_a_static_page_filters_sorts_and_shows_images(static_visit):
    page = static_visit.page
    assert page.is_hidden("#pick")  # there is no vision encoder
    assert page.text_content("#status") == "24 images, newest first"
    page.select_option("#folder", "dogs")
    static_visit.wait_until(lambda: page.text_content("#status") == "10 images of 24, newest first")
    page.fill("#from", "2024-01-01")
    static_visit.wait_until(lambda: page.text_content("#status") == "5 images of 24, newest first")
    page.click("#clear")
    static_visit.wait_until(lambda: len(static_visit.names()) == 24)
    page.click(".thumb >> nth=0")
    page.wait_for_selector("#viewer[open]")
    assert page.is_hidden("#download")
    page.keyboard.press("ArrowRight")
    assert static_visit.shown() == static_visit.names()[1]
    page.keyboard.press("m")
    static_visit.wait_until(lambda: "like=1" in page.url or page.is_visible("#example"))


@needs_npm
def test_a_static_page_has_the_images_and_results_of_the_server(static_visit, chromium, address):
    visit = Search(chromium, address)
    assert static_visit.names() == visit.names()
    assert [one.find("zebra")[0] for one in (static_visit, visit)] == [visit.names()[0]] * 2
    visit.close()


@needs_npm
def test_a_static_page_says_that_there_is_nothing_like_it(chromium, calibrated, folder, runtime, tmp_path):
    model, low, high = calibrated
    write_page(model, folder, tmp_path / "site")
    with host(tmp_path / "site") as address:
        visit = Search(chromium, address)
        check_nothing(visit, low, high)
        visit.close()


@needs_npm
def test_a_static_page_fits_a_phone(chromium, static_address):
    visit = Search(chromium, static_address, **PHONE)
    visit.find("a cat")
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    visit.close()


@needs_npm
def test_a_static_page_works_below_a_path_and_behind_a_host_that_unpacks_gzip(chromium, site, tmp_path):
    import gzip

    Path(shutil.copytree(site, tmp_path / "host" / "deep" / "page"))
    packed = tmp_path / "host" / "deep" / "page" / "ort.wasm.gz"
    packed.write_bytes(gzip.decompress(packed.read_bytes()))
    with host(tmp_path / "host") as address:
        visit = Search(chromium, f"{address}deep/page/?q=a%20cat")
        assert visit.page.locator(".score").first.text_content()
        visit.close()


@needs_npm
def test_a_file_of_a_static_page_that_is_missing_is_a_friendly_error(chromium, site, tmp_path):
    copy = Path(shutil.copytree(site, tmp_path / "site"))
    (copy / "text_model.onnx").unlink()
    with host(copy) as address:
        visit = Search(chromium, address)
        visit.page.fill("#query", "a cat")
        visit.page.wait_for_selector("#error >> text=text_model.onnx cannot be fetched: 404")
        visit.page.close()


@needs_npm
def test_files_of_two_exports_do_not_mix(chromium, site, tmp_path):
    copy = Path(shutil.copytree(site, tmp_path / "site"))
    (copy / "vectors.bin").write_bytes((site / "vectors.bin").read_bytes()[:-24])
    with host(copy) as address:
        visit = Visit(chromium, address)
        visit.page.wait_for_selector("#error >> text=do not belong together")
        visit.page.close()


@needs_npm
def test_a_static_page_is_complete_small_and_says_what_it_has(site):
    settings = json.loads((site / "settings.json").read_text())
    assert settings["library"]["images"] == 24
    assert settings["text"]["download_bytes"] < 5_000_000
    assert len(list((site / "thumbnails").rglob("*.jpg"))) == 24
    licenses = (site / "LICENSES.txt").read_text()
    assert "Microsoft Corporation" in licenses
    assert "Apache License" in licenses
    items = json.loads((site / "items.json").read_text())
    assert len(items["names"]) == 25  # with the copy
    assert not any(name.startswith(("/", "..")) for name in items["names"])


@needs_npm
def test_an_earlier_page_is_replaced_only_with_overwrite_and_keeps_its_thumbnails(model, own_folder, runtime, tmp_path):
    out = tmp_path / "site"
    write_page(model, own_folder, out)
    times = {path.name: path.read_bytes() for path in (out / "thumbnails").rglob("*.jpg")}
    (own_folder / "new.jpg").write_bytes(jpeg(70))
    (own_folder / "cats" / "05.jpg").unlink()
    with pytest.raises(FileExistsError, match="--overwrite replaces it"):
        write_page(model, own_folder, out)
    write_page(model, own_folder, out, overwrite=True)
    again = {path.name: path.read_bytes() for path in (out / "thumbnails").rglob("*.jpg")}
    assert len(again) == 24
    assert len(again.items() & times.items()) == 23


@needs_npm
def test_images_that_vanish_before_the_export_are_left_out(model, own_folder, runtime, tmp_path):
    library = open_plain(model, own_folder)
    (own_folder / "cats" / "05.jpg").unlink()
    console = QuietConsole()
    static.write_static(load_onnx(model), library, tmp_path / "site", False, console)
    assert console.warnings == ["1 image left out: gone, changed or unreadable since they were indexed"]
    items = json.loads((tmp_path / "site" / "items.json").read_text())
    assert len(items["versions"]) == 23
    assert "cats/05.jpg" not in items["names"]


@needs_npm
def test_without_onnx_or_with_a_bad_int8_the_encoder_stays_as_it_is(model, folder, runtime, tmp_path, monkeypatch):
    original = (model / "text_model.onnx").read_bytes()
    monkeypatch.setattr(static, "find_spec", lambda name: None)
    assert "m1clip[export]" in write_page(model, folder, tmp_path / "a").warnings[0]
    monkeypatch.undo()
    monkeypatch.setattr(static, "MIN_COSINE", 0.999_999_99)
    assert "minimum cosine" in write_page(model, folder, tmp_path / "b").warnings[0]
    for name in ("a", "b"):
        assert (tmp_path / name / "text_model.onnx").read_bytes() == original


def test_other_folders_are_not_replaced(model, folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for out, words in ((tmp_path / "mine", "is not a page of m1clip"), (folder / "site", "is inside of")):
        with pytest.raises((ValueError, FileExistsError), match=words):
            write_page(model, folder, out, overwrite=True)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_without_npm_one_sentence_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path))
    monkeypatch.setattr(browser_runtime.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"install npm.* or put .*tokenizers.min.mjs.* into .*browser-runtime"):
        browser_runtime.browser_runtime(QuietConsole())


def test_an_npm_that_fails_or_brings_something_else_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    npm = tmp_path / "npm"
    says_why = "case $* in *silent*) ;; *) echo 'npm error code ENOTFOUND' >&2;; esac"
    npm.write_text(f"#!/bin/sh\n{says_why}\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setattr(browser_runtime.shutil, "which", lambda name: str(npm))
    with pytest.raises(ValueError, match=r"npm cannot fetch .*ENOTFOUND"):
        browser_runtime.browser_runtime(QuietConsole())
    npm.write_text(
        '#!/bin/sh\nfor name in onnxruntime-web-1.30.0 huggingface-tokenizers-0.2.0; do echo x > "$5/$name.tgz"; done\n'
    )
    with pytest.raises(ValueError, match="npm fetched another onnxruntime-web"):
        browser_runtime.browser_runtime(QuietConsole())
    assert not browser_runtime.runtime_folder().exists()


@needs_npm
def test_a_damaged_file_of_the_runtime_is_noticed(runtime, tmp_path, monkeypatch):
    copy = shutil.copytree(browser_runtime.runtime_folder(), tmp_path / browser_runtime.runtime_folder().name)
    (Path(copy) / "tokenizers.min.mjs").write_text("alert(1)")
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="is damaged or of another version"):
        browser_runtime.browser_runtime(QuietConsole())


def test_int8_vectors_keep_the_order_of_a_hundred_random_queries():
    rng = np.random.default_rng(0)
    vectors_NE, queries_QE = (rng.normal(size=(count, 256)).astype(np.float32) for count in (5000, 100))
    vectors_NE /= np.linalg.norm(vectors_NE, axis=1, keepdims=True)
    queries_QE /= np.linalg.norm(queries_QE, axis=1, keepdims=True)
    scale_N, int8_NE = static.quantize_vectors(vectors_NE)
    error = np.abs((int8_NE * scale_N[:, None]) @ queries_QE.T - vectors_NE @ queries_QE.T)
    assert error.max() < 0.005
    assert int8_NE.min() >= -127
