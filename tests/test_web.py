"""The monitor in the browser: what the server answers, and what a real Chromium makes of it."""

import base64
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from longlog import START, put, write_eval, write_run, write_step
from m1clip.files import lock_folder
from m1clip.monitor import web

CHROMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def retrievals(step: int) -> dict:
    """Two queries over three images, with a caption that would like to be HTML."""
    made = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(made, "JPEG")
    jpeg = base64.b64encode(made.getvalue()).decode()
    words = ["a red cat", "<img src=x onerror=alert(1)> & a dog", "a blue bus"]
    shown = {str(row): {"caption": words[row], "name": f"row {row}", "jpeg": jpeg} for row in range(3)}
    hits = [{"row": row, "score": 0.9 - row / 10, "same_caption": False} for row in range(3)]
    queries = [
        {"group": "errors", "text": words[1], "truth": 1, "rank": 2, "true_score": 0.8, "top": hits},
        {"group": "sample", "text": words[0], "truth": 0, "rank": 1, "true_score": 0.9, "top": hits},
        {"group": "sample", "text": words[2], "truth": 2, "rank": 30, "true_score": 0.1, "top": hits[:2]},
    ]
    return {"step": step, "time": START, "queries": queries, "shown": shown}


@pytest.fixture
def folder(tmp_path):
    """Two dead runs: `old` and, newer, `new`, which has been evaluated."""
    for name, steps in (("old", 400), ("new", 300)):
        write_run(tmp_path / name, steps, (100, 120), (50,), None, half=False)
        os.utime(tmp_path / name / "config.json", (1, 1) if name == "old" else (2, 2))
    with open(tmp_path / "new" / "metrics.jsonl", "a") as file:
        write_eval(file, 300, 300)
    (tmp_path / "new" / "retrievals.json").write_text(json.dumps(retrievals(300)))
    return tmp_path


@pytest.fixture
def client(folder):
    return TestClient(web.app(web.Runs(folder)), base_url="http://127.0.0.1")


def test_runs_are_listed_newest_first_with_the_curves_there_are(client):
    found = client.get("/api/runs").json()
    assert [row["run"] for row in found["runs"]] == ["new", "old"]
    assert found["runs"][0]["state"] == "dead"
    assert "mean_r1" in {curve["key"] for curve in found["curves"]}


def test_a_run_is_described_and_an_unknown_one_is_not_found(client):
    about = client.get("/api/run/new").json()
    assert about["summary"]["reason"] == "its process 1 is gone"
    assert about["phases_ms"]["forward"] == 150.0
    assert about["chance"]["loss"] == pytest.approx(5.545, abs=1e-3)
    assert about["events"][0]["words"].startswith("throttling")
    assert about["flow"]["block"][0] == "vision.blocks.0"
    assert len(about["flow"]["norm"][0]) == len(about["flow"]["step"])
    assert client.get("/api/run/nobody").status_code == 404


@pytest.mark.parametrize("name", ["..", ".", "%2e%2e", "..%2foutside", "new%2f..%2f..%2foutside", "%5coutside", "%00"])
def test_no_name_leads_out_of_the_folder(folder, name):
    """Beside the folder that is served there is another run."""
    inner = folder / "inner"
    inner.mkdir()
    shutil.copytree(folder / "new", folder / "outside")
    shutil.move(folder / "new", inner / "new")
    (folder / "config.json").write_text('{"epochs": 1}')
    client = TestClient(web.app(web.Runs(inner)), base_url="http://127.0.0.1")
    assert client.get("/api/run/new").status_code == 200
    assert client.get(f"/api/run/{name}").status_code == 404
    assert client.get(f"/api/run/{name}/metrics.csv").status_code == 404
    assert client.get("/page/..%2fweb.py").status_code == 404
    outside = web.Runs(inner).versions(["../outside", str(folder / "outside"), "new", "x\0"])
    assert list(outside) == ["new"]


def test_curves_are_thinned_cut_and_smoothed(client):
    whole = client.get("/api/curves?run=old&run=new&key=loss&key=mean_r1").json()
    assert len(whole["old"]["loss"]["x"]) == 400 - 20 + 1  # and the break
    assert None in whole["old"]["loss"]["y"]
    assert whole["new"]["mean_r1"]["chance"] == pytest.approx(1 / 240)
    few = client.get("/api/curves?run=old&key=loss&most=50").json()["old"]["loss"]
    assert len(few["x"]) < 80
    cut = client.get("/api/curves?run=old&key=loss&start=200&end=210").json()["old"]["loss"]
    assert (cut["x"][0], cut["x"][-1]) == (199, 211)
    minutes = client.get("/api/curves?run=old&key=loss&over=minutes").json()["old"]["loss"]["x"]
    assert minutes[-1] == pytest.approx(380 * 480.3 / 60_000, rel=0.02)
    assert client.get("/api/curves?run=old&key=loss&most=9999999").status_code == 422
    assert client.get("/api/curves?run=old&key=nonsense").json() == {"old": {}}


def test_the_csv_has_every_step(client):
    answer = client.get("/api/run/old/metrics.csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert len(rows) == 380
    assert rows[-1]["step"] == "400"
    assert rows[49]["loss"] == ""  # it was not finite
    assert 'filename="old.csv"' in answer.headers["content-disposition"]


def test_other_names_of_the_host_are_turned_away(folder):
    """A page elsewhere that resolves to this machine must not read what is here."""
    client = TestClient(web.app(web.Runs(folder)), base_url="http://127.0.0.1")
    for name in (
        "evil.example",
        "127.0.0.1.evil.example",
        "",
        "a:80:80",
        "localhost@evil.example",
        "evil.example:80",
    ):
        assert client.get("/api/runs", headers={"host": name}).status_code == 421, name
    for name in ("localhost:8265", "127.0.0.1", "[::1]:8265"):
        assert client.get("/api/runs", headers={"host": name}).status_code == 200, name


def test_with_a_token_nobody_else_comes_in(folder):
    client = TestClient(web.app(web.Runs(folder), "secret"), base_url="http://laptop:8265")
    assert client.get("/api/runs").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    answer = client.get("/?token=secret", follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"  # the token does not stay in the address
    assert client.get("//evil.example/?token=secret", follow_redirects=False).headers["location"] == "/"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200


def test_the_page_may_load_nothing_from_elsewhere(client):
    answer = client.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://", answer.text)
    assert client.get("/plotly.js").text.startswith("/**\n* plotly.js")


@pytest.fixture
def server(folder):
    """The command itself, in a process of its own."""
    words = [sys.executable, "-m", "m1clip", "monitor", "--web", "--runs", str(folder), "--port", "18265"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    said = process.stdout.readline()
    found = re.search(r"http://\S+", said)
    assert found, process.stderr.read()
    yield found[0]
    process.terminate()
    assert process.wait(10) == 0
    assert process.stderr.read() == ""


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    found = [path for name in CHROMES if (path := shutil.which(name))] + ([str(MAC)] if MAC.exists() else [])
    with playwright.sync_playwright() as play:
        if not found and not Path(play.chromium.executable_path).exists():
            pytest.skip("no Chromium here: apt-get install chromium, or playwright install chromium")
        made = play.chromium.launch(executable_path=found[0] if found else None, args=["--no-sandbox"])
        yield made
        made.close()


class Visit:
    """A page that was opened, and everything that went wrong with it."""

    def __init__(self, chromium, address, width=1300, height=900):
        self.page = chromium.new_page(viewport={"width": width, "height": height})
        self.page.set_default_timeout(15_000)
        self.wrong: list[str] = []
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda one: self.asked(one.url, address))
        self.page.goto(address)

    def asked(self, url, address):
        if not url.startswith((address, "data:", "blob:")):
            self.wrong.append(f"asked for {url}")

    def last_step(self, name="new"):
        """Of the loss curve that is drawn."""
        code = f"document.getElementById('chart-loss')?.data?.find(line => line.name === '{name}')?.x.at(-1)"
        return self.page.evaluate(code)

    def until(self, ready):
        for _ in range(150):
            if ready():
                return
            self.page.wait_for_timeout(100)
        raise AssertionError("it did not come")


def test_a_live_curve_grows_a_run_is_picked_another_laid_over_it_and_searched(folder, server, chromium):
    visit = Visit(chromium, server)
    page = visit.page
    page.wait_for_selector("#chart-loss .scatterlayer")
    visit.until(lambda: visit.last_step() == 300)
    assert page.text_content("#state") == "dead"
    assert page.text_content("#why").startswith("its process 1 is gone; m1clip train --resume")

    with open(folder / "new" / "metrics.jsonl", "a") as file:  # it goes on
        for step in range(301, 321):
            write_step(file, step, 400, 0.0)
        put(file, "event", 320, event="diagnosis", about="swapping", text="the machine is swapping")
    visit.until(lambda: visit.last_step() == 320)

    with lock_folder(folder / "new"):  # as training holds it, until it is killed
        visit.until(lambda: page.text_content("#state") == "running")
    visit.until(lambda: page.text_content("#state") == "dead")

    page.check("input[aria-label='compare old']")
    visit.until(lambda: visit.last_step("old") == 400)
    assert page.locator("#legend li").all_text_contents() == ["new", "old"]
    page.uncheck("input[aria-label='compare old']")

    page.fill("#find-run", "ol")
    assert page.locator("#runs tbody tr").count() == 1
    page.click("#runs tbody button")
    visit.until(lambda: page.text_content("#name") == "old")
    page.fill("#find-run", "")
    page.click("#runs tbody button >> text=new")

    page.keyboard.press("4")
    page.wait_for_selector(".query")
    assert page.locator(".query").count() == 3
    assert page.locator(".query >> nth=0 >> figure.true figcaption").text_content().startswith("2. true")
    assert page.locator(".query >> nth=2 >> .beyond figcaption").text_content().startswith("30. true")
    assert "<img src=x" in page.locator(".query >> nth=0").text_content()  # words, not an image
    page.fill("#find-query", "bus")
    visit.until(lambda: page.locator(".query").count() == 1)

    page.click("#tab-events")
    page.wait_for_selector("#event-list .diagnosis")
    assert "swapping" in page.text_content("#event-list")
    page.click("#tab-setup")
    page.fill("#find-setting", "chip")
    visit.until(lambda: page.locator("#machine tr").count() == 1)
    page.click("#tab-gradients")
    page.wait_for_selector("#flow .heatmaplayer image")

    page.check("input[aria-label='compare old']")
    visit.until(lambda: page.locator("#legend li").count() == 2)
    shutil.rmtree(folder / "old")  # what is laid over it goes; the run itself does not
    visit.until(lambda: page.locator("#runs tbody tr").count() == 1)
    with open(folder / "new" / "metrics.jsonl", "a") as file:
        write_step(file, 321, 400, 0.0)
    page.click("#tab-curves")
    visit.until(lambda: visit.last_step() == 321)
    assert page.text_content("#state") == "dead"
    assert page.is_hidden("#trouble")
    assert visit.wrong == []
    page.close()


def test_dragging_across_a_curve_asks_for_that_stretch_alone(server, chromium):
    visit = Visit(chromium, server)
    page = visit.page
    page.wait_for_selector("#chart-loss .scatterlayer")

    def drag():
        box = page.locator("#chart-loss .nsewdrag").bounding_box()
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 22, steps=5)
        page.mouse.up()
        visit.until(lambda: page.is_enabled("#whole"))
        visit.until(lambda: visit.last_step() < 250)

    drag()
    page.keyboard.press("w")
    visit.until(lambda: visit.last_step() == 300)
    drag()
    for chart in ("chart-accuracy", "chart-lr"):  # all of them
        low = page.evaluate(f"document.getElementById('{chart}').layout.xaxis.range[0]")
        assert 130 < low < 170
    page.click("#runs tbody button >> text=old")
    visit.until(lambda: visit.last_step("old") == 400)
    page.go_back()
    visit.until(lambda: visit.last_step() == 300)
    assert page.is_disabled("#whole")
    page.select_option("#over", "minutes")
    visit.until(lambda: visit.last_step() < 3)
    assert visit.wrong == []
    page.close()


def test_on_a_phone_nothing_reaches_over_the_edge_and_the_keyboard_is_enough(server, chromium):
    visit = Visit(chromium, server, 390, 844)
    page = visit.page
    page.wait_for_selector("#chart-loss .scatterlayer")
    for tab in ("curves", "speed", "gradients", "retrievals", "events", "setup"):
        page.focus(f"#tab-{tab}")
        page.keyboard.press("Enter")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
    page.focus("#tab-setup")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-curves", "aria-selected") == "true"
    page.keyboard.press("/")
    page.keyboard.type("old")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    visit.until(lambda: page.text_content("#name") == "old")
    assert visit.wrong == []
    page.close()
