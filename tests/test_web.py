"""The web monitor: the answers of the server, and the page in a real Chromium."""

import base64
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest
from PIL import Image
from starlette.testclient import TestClient

import browser
from helpers import serve_in_thread
from long_log import MEMORY_GB, START_TIME, write_eval, write_record, write_run, write_step
from m1clip.files import lock_folder
from m1clip.monitor import web


def retrievals(step: int) -> dict:
    """Three queries over three images, with a caption that looks like HTML."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(buffer, "JPEG")
    jpeg = base64.b64encode(buffer.getvalue()).decode()
    captions = ["a red cat", "<img src=x onerror=alert(1)> & a dog", "a blue bus"]
    images = {str(row): {"caption": captions[row], "name": f"row {row}", "jpeg": jpeg} for row in range(3)}
    hits = [{"row": row, "score": 0.9 - row / 10, "same_caption": False} for row in range(3)]
    queries = [
        {"group": "errors", "text": captions[1], "truth": 1, "rank": 2, "true_score": 0.8, "top": hits},
        {"group": "sample", "text": captions[0], "truth": 0, "rank": 1, "true_score": 0.9, "top": hits},
        {"group": "sample", "text": captions[2], "truth": 2, "rank": 30, "true_score": 0.1, "top": hits[:2]},
    ]
    return {"step": step, "time": START_TIME, "queries": queries, "shown": images}


@pytest.fixture
def folder(tmp_path):
    """Two dead runs: `old` and, newer, `new`, which was evaluated."""
    for name, steps in (("old", 400), ("new", 300)):
        write_run(tmp_path / name, steps, (100, 120), (50,), None, partial_line=False, watts=36.0)
        os.utime(tmp_path / name / "config.json", (1, 1) if name == "old" else (2, 2))
    with open(tmp_path / "new" / "metrics.jsonl", "a") as file:
        write_eval(file, 300, 300, watts=36.0)
    (tmp_path / "new" / "retrievals.json").write_text(json.dumps(retrievals(300)))
    return tmp_path


@pytest.fixture
def client(folder):
    return TestClient(web.create_app(web.RunCache(folder)), base_url="http://127.0.0.1")


def test_runs_are_listed_newest_first_with_all_curves(client):
    answer = client.get("/api/runs").json()
    assert [row["run"] for row in answer["runs"]] == ["new", "old"]
    assert answer["runs"][0]["state"] == "dead"
    assert {curve["key"] for curve in client.get("/curves.json").json()} == set(web.CURVES)


def test_a_run_is_described_and_an_unknown_run_is_not_found(client):
    run = client.get("/api/run/new").json()
    assert run["summary"]["reason"] == "its process 1 is gone"
    assert list(run["phases_ms"].values()) == pytest.approx([0.1, 0.2, 150.0, 300.0, 29.7])
    assert run["chance"]["loss"] == pytest.approx(5.545, abs=1e-3)
    assert run["events"][0]["text"].startswith("throttling")
    assert run["gradient_flow"]["block"][0] == "vision.blocks.0"
    assert len(run["gradient_flow"]["norm"][0]) == len(run["gradient_flow"]["step"])
    assert run["diagnostics"]["memory_gb"] == MEMORY_GB
    assert run["epoch"]["wh_so_far"] == pytest.approx(36 * 300 * 0.48 / 3600)
    assert client.get("/api/run/nobody").status_code == 404


def test_settings_that_differ_from_the_preset_are_described_with_the_preset_value(folder, client):
    config = json.loads((folder / "new" / "config.json").read_text())
    changes = {"lr": 0.5, "model": {"vision": {"width": 64}}, "optimizer": "muon", "unknown_setting": 1}
    (folder / "new" / "config.json").write_text(json.dumps(config | changes))
    values = client.get("/api/run/new").json()["preset_values"]
    assert values == {"epochs": 3, "lr": 3e-3, "model.vision.width": 128}
    (folder / "old" / "config.json").write_text(json.dumps({"epochs": 1, "preset": "budget"}))
    assert client.get("/api/run/old").json()["preset_values"] == {}


@pytest.mark.parametrize("name", ["..", ".", "%2e%2e", "..%2foutside", "new%2f..%2f..%2foutside", "%5coutside", "%00"])
def test_no_name_leads_out_of_the_folder(folder, name):
    """There is another run beside the folder that is served."""
    inner = folder / "inner"
    inner.mkdir()
    shutil.copytree(folder / "new", folder / "outside")
    shutil.move(folder / "new", inner / "new")
    (folder / "config.json").write_text('{"epochs": 1}')
    client = TestClient(web.create_app(web.RunCache(inner)), base_url="http://127.0.0.1")
    assert client.get("/api/run/new").status_code == 200
    assert client.get("/page.js").status_code == 200
    assert client.get(f"/api/run/{name}").status_code == 404
    assert client.get(f"/api/run/{name}/metrics.csv").status_code == 404
    assert client.get("/..%2fweb.py").status_code == 404


def test_curves_are_downsampled_cut_and_smoothed(client):
    curves = client.get("/api/curves?run=old&run=new&key=loss&key=mean_r1").json()
    assert len(curves["old"]["loss"]["x"]) == 400 - 20 + 1  # and the gap
    assert None in curves["old"]["loss"]["y"]
    assert curves["new"]["mean_r1"]["chance"] == pytest.approx(1 / 240)
    few = client.get("/api/curves?run=old&key=loss&max_points=50").json()["old"]["loss"]
    assert len(few["x"]) < 80
    cut = client.get("/api/curves?run=old&key=loss&start=200&end=210").json()["old"]["loss"]
    assert (cut["x"][0], cut["x"][-1]) == (199, 211)
    minutes = client.get("/api/curves?run=old&key=loss&x_axis=minutes").json()["old"]["loss"]["x"]
    assert minutes[-1] == pytest.approx(380 * 480.3 / 60_000, rel=0.02)
    smooth = client.get("/api/curves?run=old&key=loss&smooth=100").json()["old"]["loss"]["y"]
    last_losses = [value for value in curves["old"]["loss"]["y"][-100:] if value is not None]
    assert smooth[-1] == pytest.approx(sum(last_losses) / len(last_losses), rel=1e-5)
    assert client.get("/api/curves?run=old&key=loss&max_points=9999999").status_code == 422
    assert client.get("/api/curves?run=old&key=nonsense").json() == {"old": {}}


def test_the_csv_has_every_step(client):
    answer = client.get("/api/run/old/metrics.csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [float(row["step"]) for row in rows] == [step for step in range(1, 401) if not 100 <= step < 120]
    assert rows[49]["loss"] == ""  # it was not finite
    assert float(rows[-1]["forward_ms"]) == 150.0
    assert 'filename="old.csv"' in answer.headers["content-disposition"]


def test_requests_for_other_host_names_are_refused(folder):
    """A page elsewhere that resolves to this machine (DNS rebinding) must not read the runs."""
    client = TestClient(web.create_app(web.RunCache(folder)), base_url="http://127.0.0.1")
    refused = ("evil.example", "127.0.0.1.evil.example", "", "a:80:80", "localhost@evil.example", "evil.example:80")
    for name in refused:
        assert client.get("/api/runs", headers={"host": name}).status_code == 421, name
    for name in ("localhost:8265", "127.0.0.1", "[::1]:8265"):
        assert client.get("/api/runs", headers={"host": name}).status_code == 200, name


def test_a_token_is_required_and_moved_from_the_address_to_a_cookie(folder):
    client = TestClient(web.create_app(web.RunCache(folder), "secret"), base_url="http://laptop:8265")
    assert client.get("/api/runs").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    answer = client.get("/?token=secret", follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    assert client.get("//evil.example/?token=secret", follow_redirects=False).headers["location"] == "/"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200


def test_the_page_loads_nothing_from_other_hosts(client):
    answer = client.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://", answer.text)
    assert client.get("/plotly.min.js").text.startswith("/**\n* plotly.js")


@pytest.fixture
def server(folder):
    with serve(folder) as address:
        yield address


@contextmanager
def serve(folder, *flags):
    """The command itself, in its own process."""
    command = [sys.executable, "-m", "m1clip", "monitor", "--web", "--runs", str(folder), "--port", "18265", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = re.search(r"http://\S+", process.stdout.readline())
    assert address, process.stderr.read()
    yield address[0]
    process.terminate()
    assert process.wait(120) == 0
    assert process.stderr.read() == ""


class Visit(browser.Visit):
    def last_step(self, name="new"):
        """Of the loss curve that is drawn."""
        code = f"document.getElementById('chart-loss')?.data?.find(line => line.name === '{name}')?.x.at(-1)"
        return self.page.evaluate(code)


@pytest.mark.slow
def test_curves_grow_and_runs_are_selected_compared_and_searched(folder, server, chromium):
    visit = Visit(chromium, server)
    page = visit.page
    page.wait_for_selector("#chart-loss .scatterlayer")
    visit.wait_until(lambda: visit.last_step() == 300)
    assert page.text_content("#state") == "dead"
    assert page.text_content("#problem").startswith("its process 1 is gone; resume: m1clip train --resume")

    with open(folder / "new" / "metrics.jsonl", "a") as file:
        for step in range(301, 321):
            write_step(file, step, 400, 0.0)
        write_record(file, "event", 320, event="diagnosis", about="swapping", text="the machine is swapping")
    visit.wait_until(lambda: visit.last_step() == 320)

    with lock_folder(folder / "new"):  # as training holds it, until it is killed
        visit.wait_until(lambda: page.text_content("#state") == "running, no sign of life")  # its status is old
    visit.wait_until(lambda: page.text_content("#state") == "dead")

    page.check("input[aria-label='compare old']")
    visit.wait_until(lambda: visit.last_step("old") == 400)
    assert page.locator("#legend li").all_text_contents() == ["new", "old"]
    page.uncheck("input[aria-label='compare old']")

    page.fill("#find-run", "ol")
    assert page.locator("#runs tbody tr").count() == 1
    page.click("#runs tbody button")
    visit.wait_until(lambda: page.text_content("#name") == "old")
    page.fill("#find-run", "")
    page.click("#runs tbody button >> text=new")

    page.check("input[aria-label='compare old']")
    visit.wait_until(lambda: page.locator("#legend li").count() == 2)
    shutil.rmtree(folder / "old")  # the compared run disappears, the selected one stays
    visit.wait_until(lambda: page.locator("#runs tbody tr").count() == 1)
    with open(folder / "new" / "metrics.jsonl", "a") as file:
        write_step(file, 321, 400, 0.0)
    visit.wait_until(lambda: visit.last_step() == 321)
    assert page.text_content("#state") == "dead"
    assert page.is_hidden("#error")
    assert visit.errors == []
    page.close()


@pytest.mark.slow
def test_a_page_opened_with_a_token_hides_it_and_says_when_it_is_no_longer_valid(folder, chromium):
    with serve(folder, "--token", "auto") as address:
        page = Visit(chromium, address).page
        page.wait_for_selector("#chart-loss .scatterlayer")
        assert "token" not in page.url
        assert page.evaluate("document.cookie") == ""
        (cookie,) = page.context.cookies()
        assert cookie["value"] not in address
        page.click("#csv")  # the API has the cookie too
    page.wait_for_selector("#error >> text=does not answer")
    with serve(folder, "--token", "auto"):  # another server at the same address
        page.wait_for_selector("#error >> text=a token is needed")
    page.close()


@pytest.mark.slow
def test_the_newest_steps_of_a_long_log_are_drawn_before_its_history(tmp_path, chromium, monkeypatch):
    write_run(tmp_path / "long", 3000, (1000, 1200), (), 1800)
    for name, size in (("log.TAIL_BYTES", 100_000), ("log.BLOCK_SIZE", 1024), ("web.PART_BYTES", 1)):
        monkeypatch.setattr(f"m1clip.monitor.{name}", size)
    gate, read_history = threading.Event(), web.RunCache._read_history
    monkeypatch.setattr(web.RunCache, "_read_history", lambda *args: gate.wait(120) and read_history(*args))
    with serve_in_thread(web.RunCache(tmp_path)) as address:
        visit = Visit(chromium, address)
        page = visit.page
        page.wait_for_selector("#reading >> text=the history is being read")
        visit.wait_until(lambda: visit.last_step("long") == 3000)
        first_step = "document.getElementById('chart-loss').data.at(-1).x[0]"
        assert page.evaluate(first_step) > 2000
        monkeypatch.setattr(web, "PART_BYTES", 10**9)
        gate.set()
        visit.wait_until(lambda: page.text_content("#reading") == "")
        visit.wait_until(lambda: page.evaluate(first_step) == 1)
        assert visit.errors == []
        page.close()


@pytest.mark.slow
def test_every_tab_shows_its_records(folder, server, chromium):
    config = json.loads((folder / "new" / "config.json").read_text())
    (folder / "new" / "config.json").write_text(json.dumps(config | {"lr": 0.5, "batch_size": 256}))
    visit = Visit(chromium, server)
    page = visit.page
    page.wait_for_selector("#chart-loss .scatterlayer")
    assert "energy" in page.text_content("#facts")
    assert "R@1 per Wh" in page.text_content("#facts")
    page.click("#tab-speed")
    page.wait_for_selector("#memory .bar-row")
    parts = page.locator("#memory .bar-row span:first-child").all_text_contents()
    assert parts == [name for name, gb in MEMORY_GB.items() if gb > 0]
    assert "process (RSS) 1.20 GB, peak 1.50 GB" in page.text_content("#memory")
    assert "energy 1.44 Wh, last epoch 4.8 Wh" in page.text_content("#sensors")
    page.wait_for_selector("#chart-wh_so_far .scatterlayer")

    page.click("#tab-gradients")
    page.wait_for_selector("#heatmap .heatmaplayer image")
    page.keyboard.press("4")
    page.wait_for_selector(".query")
    assert page.locator(".query").count() == 3
    assert page.locator(".query >> nth=0 >> figure.true figcaption").text_content().startswith("2. true")
    assert page.locator(".query >> nth=2 >> .beyond figcaption").text_content().startswith("30. true")
    assert "<img src=x" in page.locator(".query >> nth=0").text_content()  # text, not an image
    page.fill("#find-query", "bus")
    visit.wait_until(lambda: page.locator(".query").count() == 1)

    page.click("#tab-events")
    page.wait_for_selector("#event-list .diagnosis")
    assert "throttling" in page.text_content("#event-list")
    page.click("#tab-settings")
    page.wait_for_selector("#config tr.changed")
    assert page.locator("#config tr.changed").all_text_contents() == ["epochs100 (preset 3)", "lr0.5 (preset 0.003)"]
    page.fill("#find-setting", "chip")
    visit.wait_until(lambda: page.locator("#machine tr").count() == 1)
    assert visit.errors == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["**/api/runs", "**/api/run/new", "**/api/curves*", "**/plotly.min.js"])
def test_a_loading_indicator_is_shown_until_the_curves_are_drawn(server, chromium, path):
    visit = Visit(chromium, server, slow_path=path)
    page = visit.page
    visit.wait_until(lambda: visit.held)
    busy = "[aria-busy=true], #loading:not([hidden])"
    assert page.locator(busy).count() > 0
    assert page.locator("#chart-loss .scatterlayer").count() == 0
    visit.release()
    page.wait_for_selector("#chart-loss .scatterlayer")
    visit.wait_until(lambda: page.locator(busy).count() == 0)
    assert visit.errors == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high"), [(1e-4, 1e4), (0.3, 20.0), (0.9, 1.1), (2.0, 2.0)])
def test_ticks_of_log_axes_do_not_overlap(folder, server, chromium, low, high):
    with open(folder / "new" / "metrics.jsonl", "w") as file:
        for step in range(1, 200):
            write_record(file, "step", step, loss=1.0, grad_norm=low * (high / low) ** (step / 199))
    visit = Visit(chromium, server + "#smooth=1")
    page = visit.page
    page.wait_for_selector("#chart-grad_norm .ytick text")
    assert page.locator("#chart-grad_norm").locator("xpath=..").locator("h2").text_content() == "gradient norm (log)"
    page.wait_for_selector("#curves[aria-busy=false]")
    code = """[...document.querySelectorAll("#chart-grad_norm .ytick text")]
      .map((tick) => tick.getBoundingClientRect()).map((box) => [box.top, box.bottom])"""
    edges = sorted(page.evaluate(code))
    assert 1 <= len(edges) <= 8
    assert all(end <= start for (_, end), (start, _) in pairwise(edges))
    page.close()


@pytest.mark.slow
def test_long_run_names_are_not_broken_inside_a_word(folder, server, chromium):
    name = "nano_augmented-sweep_warmup-experiment_3"
    shutil.copytree(folder / "new", folder / name)
    visit = Visit(chromium, server)
    page = visit.page
    page.wait_for_selector("#runs tbody button >> text=warmup")
    code = """() => {
      const buttons = [...document.querySelectorAll("#runs button")];
      const button = buttons.find((each) => each.textContent.startsWith("nano_"));
      const lines = {}, range = document.createRange();
      for (const node of button.childNodes) for (let at = 0; at < (node.length ?? 0); at++) {
        range.setStart(node, at); range.setEnd(node, at + 1);
        const top = Math.round(range.getBoundingClientRect().top);
        lines[top] = (lines[top] ?? "") + node.data[at]; }
      return Object.values(lines); }"""
    lines = page.evaluate(code)
    assert "".join(lines) == name
    assert all(line[-1] in "_-" for line in lines[:-1])
    page.close()


@pytest.mark.slow
def test_dragging_across_a_curve_zooms_all_curves(server, chromium):
    visit = Visit(chromium, server)
    page = visit.page
    page.wait_for_selector("#chart-loss .scatterlayer")

    def drag():
        box = page.locator("#chart-loss .nsewdrag").bounding_box()
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 22, steps=5)
        page.mouse.up()
        visit.wait_until(lambda: page.is_enabled("#whole"))
        visit.wait_until(lambda: visit.last_step() < 250)

    drag()
    page.keyboard.press("w")
    visit.wait_until(lambda: visit.last_step() == 300)
    drag()
    for chart in ("chart-accuracy", "chart-lr"):
        low = page.evaluate(f"document.getElementById('{chart}').layout.xaxis.range[0]")
        assert 130 < low < 170
    page.click("#runs tbody button >> text=old")
    visit.wait_until(lambda: visit.last_step("old") == 400)
    page.go_back()
    visit.wait_until(lambda: visit.last_step() == 300)
    assert page.is_disabled("#whole")
    page.select_option("#xAxis", "minutes")
    visit.wait_until(lambda: visit.last_step() < 3)
    assert visit.errors == []
    page.close()


@pytest.mark.slow
def test_a_phone_needs_no_horizontal_scrolling_and_the_keyboard_is_enough(server, chromium):
    visit = Visit(chromium, server, 390, 844)
    page = visit.page
    page.wait_for_selector("#chart-loss .scatterlayer")
    for tab in ("curves", "speed", "gradients", "retrievals", "events", "settings"):
        page.focus(f"#tab-{tab}")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#{tab}[aria-busy=false]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
    page.focus("#tab-settings")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-curves", "aria-selected") == "true"
    page.keyboard.press("/")
    page.keyboard.type("old")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    visit.wait_until(lambda: page.text_content("#name") == "old")
    assert visit.errors == []
    page.close()
