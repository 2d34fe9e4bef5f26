"""m1clip serve: every request format compared with the model, real clients, limits, and hostile requests."""

import base64
import http.client
import io
import json
import multiprocessing
import os
import plistlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
import tracemalloc
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from schemathesis import GenerationMode
from starlette.testclient import TestClient

from helpers import run_in_thread
from m1clip import cli
from m1clip.commands import parse_flags
from m1clip.commands import serve as serve_command
from m1clip.images import preprocess
from m1clip.onnx_model import load_onnx
from m1clip.serve import Limits
from m1clip.serve.app import SearchHit, Service, embedding_app
from m1clip.serve.engine import Engine
from m1clip.serve.metrics import Metrics
from m1clip.serve.middleware import LineWriter
from m1clip.web import server
from m1clip.web.access import Access
from m1clip.web.server import create_server
from onnx_export import export_tiny, tiny_clip
from photos import jpeg, mutated
from test_http import SCHEMA_CHECKS

TOKEN = "a-Secret"
TEXTS = ["a red cat", "a bus", "a much longer caption than all of the others", "a bus", "zebra, é!"]
LIMITS = Limits(max_batch=64, max_queue=128, max_bytes=300_000, max_pixels=1_000_000)


@pytest.fixture(scope="module")
def tiny_onnx(tmp_path_factory):
    return export_tiny(tiny_clip(), tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module")
def model(tiny_onnx):
    return load_onnx(tiny_onnx)


class Index:
    """Three images, which fit any query."""

    def search(self, query_E, top_k):
        assert np.linalg.norm(query_E) == pytest.approx(1, abs=1e-5)
        hits = [SearchHit(row, f"photos/{row}.jpg", 1 - row / 10) for row in range(3)]
        return hits[:top_k]


def make_app(model, limits=LIMITS, token=None, index=None, log=None, engine=None):
    metrics = Metrics()
    engine = engine or Engine(model, limits, None, metrics.add_batch)
    access = Access(token, lambda: 0.0, api_prefix="/")
    return embedding_app(Service(engine, "tiny", metrics, index), access, log)


@pytest.fixture
def client(model):
    with TestClient(make_app(model, index=Index()), base_url="http://127.0.0.1:8266") as client:
        yield client


@pytest.fixture(scope="module")
def address(model):
    """A real server in a thread."""
    with run_in_thread(create_server(make_app(model), limit_concurrency=None)) as url:
        yield url


def data_uri(data):
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def assert_same(ours, expected):
    np.testing.assert_allclose(np.array(ours, np.float32), expected, rtol=0, atol=1e-5)


PHOTOS = [jpeg(number) for number in range(3)]
URIS = list(map(data_uri, PHOTOS))
IMAGE_URL = {"type": "image_url", "image_url": {"url": URIS[0]}}


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"input": TEXTS}, TEXTS),
        ({"input": TEXTS[0], "model": "any", "user": "me", "encoding_format": "float"}, TEXTS[:1]),
        ({"input": TEXTS, "modality": "text"}, TEXTS),
        ({"input": TEXTS, "encoding_format": None, "dimensions": None, "model": None}, TEXTS),
        ({"input": [{"text": text} for text in TEXTS], "task": "retrieval.query"}, TEXTS),
        ({"input": {"text": TEXTS[1]}}, TEXTS[1:2]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": TEXTS[0]}]}]}, TEXTS[:1]),
        ({"messages": [{"role": "user", "content": TEXTS[0]}]}, TEXTS[:1]),
    ],
)
def test_texts_in_the_formats_of_openai_infinity_jina_and_vllm(client, model, body, texts):
    answer = client.post("/v1/embeddings", json=body).json()
    assert answer["object"] == "list"
    assert [each["index"] for each in answer["data"]] == list(range(len(texts)))
    assert_same([each["embedding"] for each in answer["data"]], model.encode_text(texts))
    tokens = sum(map(len, model.tokenizer.encode(texts, model.config.text.context_length)))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"input": URIS, "modality": "image"}, 3),
        ({"input": URIS[0], "modality": "image"}, 1),
        ({"input": [{"image": uri} for uri in URIS]}, 3),
        ({"input": [{"image": base64.b64encode(PHOTOS[0]).decode()}]}, 1),
        ({"input": [{"image": base64.encodebytes(PHOTOS[0]).decode()}]}, 1),
        ({"messages": [{"role": "user", "content": [IMAGE_URL]}]}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": URIS[0]}]}]}, 1),
    ],
)
def test_images_in_the_formats_of_infinity_jina_and_vllm(client, model, body, count):
    answer = client.post("/embeddings", json=body).json()
    assert_same([each["embedding"] for each in answer["data"]], model.encode_image(PHOTOS[:count]))


def test_texts_and_images_of_one_request_keep_their_order(client, model):
    body = {"input": [{"image": URIS[1]}, {"text": TEXTS[0]}, {"image": URIS[0]}, TEXTS[1]]}
    rows = [each["embedding"] for each in client.post("/v1/embeddings", json=body).json()["data"]]
    assert_same(rows[::2], model.encode_image(PHOTOS[1::-1]))
    assert_same(rows[1::2], model.encode_text(TEXTS[:2]))


def test_base64_has_the_bits_of_the_floats_and_dimensions_are_unit_vectors_again(client, model):
    def ask(**options):
        body = {"input": TEXTS, **options}
        return [each["embedding"] for each in client.post("/v1/embeddings", json=body).json()["data"]]

    floats, encoded = np.array(ask(), np.float32), ask(encoding_format="base64")
    assert np.array_equal(floats, [np.frombuffer(base64.b64decode(each), "<f4") for each in encoded])
    short = np.array(ask(dimensions=7))
    expected = model.encode_text(TEXTS)[:, :7]
    assert_same(short, expected / np.linalg.norm(expected, axis=1, keepdims=True))
    assert ask(dimensions=24) == ask()
    assert ask(embedding_type="base64") == encoded


def test_token_ids_are_those_of_the_models_own_tokenizer(client, model):
    ids = [each[1:-1] for each in model.tokenizer.encode(TEXTS, 24)]  # without start and end
    for tokens, texts in ((ids, TEXTS), (ids[0], TEXTS[:1])):
        answer = client.post("/v1/embeddings", json={"input": tokens}).json()
        assert_same([each["embedding"] for each in answer["data"]], model.encode_text(texts))


def test_cohere_formats(client, model):
    def ask(**body):
        return client.post("/v2/embed", json={"model": "x", "input_type": "search_query", **body}).json()["embeddings"]

    inputs = [{"content": [{"type": "text", "text": TEXTS[0]}]}, {"content": [IMAGE_URL]}]
    assert_same(ask(texts=TEXTS)["float"], model.encode_text(TEXTS))
    assert_same(ask(images=URIS)["float"], model.encode_image(PHOTOS))
    assert_same(ask(inputs=inputs)["float"][1], model.encode_image(PHOTOS[0])[0])
    kinds = ["float", "base64", "int8", "uint8", "binary", "ubinary"]
    all_types = ask(texts=TEXTS, embedding_types=kinds, output_dimension=16)
    floats = np.array(all_types["float"], np.float32)
    assert np.array_equal(floats, [np.frombuffer(base64.b64decode(each), "<f4") for each in all_types["base64"]])
    bits = np.packbits(floats > 0, axis=1)
    assert np.array_equal(bits, all_types["ubinary"])
    assert np.array_equal(bits.astype(int) - 128, all_types["binary"])
    signed = np.array(all_types["int8"])
    assert np.abs(signed).max(axis=1).tolist() == [127] * len(TEXTS)
    assert np.array_equal(signed + 128, all_types["uint8"])
    scaled = signed / np.linalg.norm(signed, axis=1, keepdims=True)
    np.testing.assert_allclose(scaled, floats, rtol=0, atol=0.01)


@pytest.mark.parametrize("path", ["/", "/v1/classify"])
@pytest.mark.parametrize("template", [None, "it is {}, no doubt"])
def test_zero_shot_classification_equals_that_of_the_model(client, model, path, template):
    parameters = {"candidate_labels": ["cat", "old dog", "owl"], "hypothesis_template": template}
    answer = client.post(path, json={"inputs": URIS[0], "parameters": parameters}).json()
    (expected,) = model.classify(PHOTOS[0], parameters["candidate_labels"], template or ())
    assert [each["label"] for each in answer] == [label for label, _ in expected.top]
    assert [each["score"] for each in answer] == pytest.approx([score for _, score in expected.top], abs=1e-5)
    joined = {**parameters, "candidate_labels": "cat, old dog,owl"}
    assert client.post(path, json={"inputs": URIS[0], "parameters": joined}).json() == answer


def test_an_immich_request(client, model):
    def ask(kind, **form):
        entries = json.dumps({"clip": {kind: {"modelName": "ViT-B-32__openai", "options": {}}}})
        return client.post("/predict", data={"entries": entries, **form.pop("data", {})}, **form).json()

    answer = ask("visual", files={"image": ("photo", PHOTOS[0])})
    assert_same(json.loads(answer["clip"]), model.encode_image(PHOTOS[0])[0])
    assert (answer["imageHeight"], answer["imageWidth"]) == (48, 48)
    answer = ask("textual", data={"text": TEXTS[0]})
    assert answer.keys() == {"clip"}
    assert_same(json.loads(answer["clip"]), model.encode_text(TEXTS[0])[0])
    assert client.get("/ping").text == "pong"


def test_search_over_an_index(client, model):
    answer = client.post("/v1/search", json={"query": "a cat", "top_k": 2}).json()
    assert answer["data"][0] == {"row": 0, "path": "photos/0.jpg", "score": 1.0}
    assert len(answer["data"]) == 2
    assert len(client.post("/v1/search", json={"image": URIS[0]}).json()["data"]) == 3
    without = TestClient(make_app(model), base_url="http://127.0.0.1").post("/v1/search", json={"query": "a cat"})
    assert (without.status_code, without.json()["error"]["type"]) == (404, "invalid_request_error")
    assert "--search DIR" in without.json()["error"]["message"]


def test_models_health_figures_and_documentation(client):
    (served,) = client.get("/v1/models").json()["data"]
    assert (served["id"], served["dimensions"], served["image_size"]) == ("tiny", 24, 32)
    assert client.get("/v1/models/tiny").json() == served
    assert "the model of this server is tiny" in client.get("/v1/models/other").json()["error"]["message"]
    assert client.get("/health").json() == {"status": "ok"}
    client.post("/v1/embeddings", json={"input": TEXTS})
    figures = client.get("/metrics").text
    assert 'm1clip_requests_total{path="/v1/embeddings",status="200"} 1.0' in figures
    assert 'm1clip_items_total{encoder="text"} 5.0' in figures
    assert "process_resident_memory_bytes" in figures
    page = client.get("/docs")
    assert "/v1/embeddings" in page.text
    assert "http://" not in page.text.replace("http://127.0.0.1", "")
    assert "https://" not in page.text
    assert client.get("/").text == page.text


def test_health_checks_may_send_head_instead_of_get(address):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)
    for path, status in (("/health", 200), ("/ping", 200), ("/v1/embeddings", 405)):
        connection.request("HEAD", path)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, b"")


LABELS = {"candidate_labels": ["a", "b"]}
WRONG = [
    ("/v1/embeddings", {}, 400, "needs either input or messages"),
    ("/v1/embeddings", {"input": "a", "messages": []}, 400, "needs either input or messages"),
    ("/v1/embeddings", {"input": []}, 400, "nothing to embed"),
    ("/v1/embeddings", {"input": ["a", "  "]}, 400, "input 1 is an empty text"),
    ("/v1/embeddings", {"input": 5}, 400, "input must be a text, a list of texts, token ids, or objects"),
    ("/v1/embeddings", {"input": ["a", 5]}, 400, "input must be a text, a list of texts"),
    ("/v1/embeddings", {"input": [[1], []]}, 400, "input 1 is an empty list"),
    ("/v1/embeddings", {"input": [1] * 10_001}, 413, "input 0 has 10,001 token ids; the limit is 10,000"),
    ("/v1/embeddings", {"input": [1, -1]}, 400, "token ids must be 0 to 511"),
    ("/v1/embeddings", {"input": [[1, 512]]}, 400, "token ids must be 0 to 511, of this model's own tokenizer"),
    ("/v1/embeddings", {"input": "a", "dimensions": 25}, 400, "dimensions must be at most 24, not 25"),
    ("/v1/embeddings", {"input": "a", "dimensions": "5"}, 400, "dimensions: Input should be a valid integer"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format: Input should be 'float'"),
    ("/v1/embeddings", {"input": [{"text": "a", "image": "b"}]}, 400, "needs either text or image"),
    ("/v1/embeddings", {"messages": [{"content": [IMAGE_URL, IMAGE_URL]}]}, 400, "one text or one image, not 2 parts"),
    ("/v1/embeddings", {"messages": [{"content": [{"type": "text"}]}]}, 400, "content of type text needs a field text"),
    ("/v1/embeddings", {"input": [{"image": "https://example.com/a.jpg"}]}, 400, "URLs are not fetched by this server"),
    ("/v1/embeddings", {"input": "HTTPS://example.com", "modality": "image"}, 400, "URLs are not fetched by this"),
    ("/v1/embeddings", {"input": "file:///etc/passwd", "modality": "image"}, 400, "image 0: "),
    ("/v1/embeddings", {"input": "data:image/png,x", "modality": "image"}, 400, "must be data:image/…;base64"),
    ("/v1/embeddings", {"input": "abc", "modality": "image"}, 400, "neither a data URI nor base64"),
    ("/v1/embeddings", {"input": "YWJj", "modality": "image"}, 400, "not an image of a known format"),
    ("/v1/embeddings", {"input": [[1]], "modality": "image"}, 400, "must be data URIs"),
    ("/v1/embeddings", ["a"], 400, "the body must be an object"),
    ("/v1/embeddings", b'{"input": "a"', 400, "the body is not JSON"),
    ("/v1/embeddings", b'{"input": "\xff"}', 400, "the body is not JSON"),
    ("/v1/embeddings", b"[" * 100_000, 400, "the body is not JSON"),
    ("/v1/embeddings", {"input": ["a"] * 65}, 413, "65 items in one request; the limit is 64"),
    ("/v1/embeddings", {"input": "a" * 10_001}, 413, "input 0 has 10,001 characters; the limit is 10,000"),
    ("/v2/embed", {"texts": ["a"], "images": []}, 400, "needs one of texts, images and inputs"),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["int4"]}, 400, "embedding_types.0: Input should be 'float'"),
    ("/v1/classify", {"inputs": URIS[0]}, 400, "parameters: Field required"),
    ("/v1/classify", {"inputs": URIS[0], "parameters": {"candidate_labels": ["a"]}}, 400, "must be at least two"),
    ("/v1/classify", {"inputs": URIS[0], "parameters": {"candidate_labels": ["a", "A"]}}, 400, "given twice"),
    ("/v1/classify", {"inputs": URIS[0], "parameters": {**LABELS, "hypothesis_template": "x"}}, 400, "needs a {}"),
    ("/v1/classify", {"inputs": URIS[0], "parameters": {"candidate_labels": [*map(str, range(60))]}}, 413, "60 labels"),
    ("/v1/classify", {"inputs": "", "parameters": {"candidate_labels": ["a"] * 65}}, 413, "65 labels; the limit is 64"),
    ("/v1/search", {"query": "a", "image": URIS[0]}, 400, "needs either query or image"),
    ("/v1/search", {"query": "a", "top_k": 0}, 400, "top_k: Input should be greater than or equal to 1"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), WRONG)
def test_a_wrong_request_is_one_sentence_in_the_format_of_its_server(client, path, body, status, words):
    options = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = client.post(path, **options)
    error = answer.json()
    shapes = {"/v2/embed": lambda: error["message"], "/v1/classify": lambda: error["error"]}
    message = shapes.get(path, lambda: error["error"]["message"])()
    assert (answer.status_code, words in message, "\n" in message) == (status, True, False), message


def test_wrong_immich_requests_and_unknown_paths(client):
    for entries in ("", "[]", "{}", '{"clip": {}}', '{"clip": 5}', '{"facial-recognition": {"x": {}}}', "[" * 10_000):
        answer = client.post("/predict", data={"entries": entries, "text": "a"})
        assert (answer.status_code, "entries" in answer.json()["detail"]) == (422, True), entries
    visual = {"entries": '{"clip": {"visual": {}}}'}
    assert client.post("/predict", data=visual).json()["detail"] == "visual needs image"
    assert client.post("/predict", data=visual, files={"image": b"x"}).status_code == 400
    assert client.post("/predict", data={**visual, "image": "x"}).json()["detail"] == "image: needs a file"
    assert client.post("/predict", content=b"x").status_code == 422
    broken = {"content-type": "multipart/form-data; boundary=x"}
    assert client.post("/predict", content=b"--x\r\nA" + bytes(99), headers=broken).status_code == 400
    assert client.get("/v1/nothing").json()["error"]["message"] == "Not Found"
    assert client.get("/v1/embeddings").headers["allow"] == "POST"


def test_a_body_that_is_too_large_is_refused_while_it_arrives(client):
    large = b'{"input": "' + b"a" * LIMITS.max_bytes + b'"}'
    answers = [client.post("/v1/embeddings", content=content) for content in (large, iter([large[:100], large[100:]]))]
    answers.append(client.post("/predict", data={"entries": "{}"}, files={"image": large}))
    assert [answer.status_code for answer in answers] == [413, 413, 413]
    assert "larger than 0.3 MB" in answers[0].json()["error"]["message"]


HOSTILE_LISTS = [
    {"input": [{"text": 1}] * 120_000},
    {"input": [{"text": "a"}] * 120_000},
    {"input": [[1]] * 120_000},
    {"messages": [{"content": []}] * 120_000},
    {"input": "a", "ignored": [[]] * 1_100_000},
]


@pytest.mark.parametrize("body", HOSTILE_LISTS)
def test_a_body_of_a_million_values_is_refused_before_they_become_objects(model, body):
    with TestClient(make_app(model, replace(LIMITS, max_bytes=32_000_000)), base_url="http://127.0.0.1") as client:
        data = json.dumps(body)
        tracemalloc.start()
        answer = client.post("/v1/embeddings", content=data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert answer.status_code in (400, 413)
    assert peak < 100_000_000


def test_an_image_of_too_many_pixels_is_refused_at_its_header(client):
    file = io.BytesIO()
    Image.new("L", (1001, 1000)).save(file, "PNG")
    answer = client.post("/v1/embeddings", json={"input": data_uri(file.getvalue()), "modality": "image"})
    assert (answer.status_code, "1,001 × 1,000 pixels" in answer.json()["error"]["message"]) == (413, True)


def test_of_a_very_long_image_only_the_middle_is_resized(model, monkeypatch):
    sizes, resize = [], Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, *args: sizes.append(size) or resize(self, size, *args)
    )
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6000, 12, 3), np.uint8))
    pixels = preprocess(image, model.config.vision.preprocess)
    assert sizes == [(32, 1600)]
    whole = resize(image, (32, 16_000), Image.Resampling.BICUBIC).crop((0, 7984, 32, 8016))
    np.testing.assert_allclose(pixels.astype(int), np.asarray(whole, int), atol=1)


class Gate:
    """Holds the text encoder until it is opened."""

    def __init__(self, monkeypatch, model):
        self.reached, self.opened, embed_ids = threading.Event(), threading.Event(), model.embed_ids

        def wait(ids):
            self.reached.set()
            assert self.opened.wait(120)
            return embed_ids(ids)

        monkeypatch.setattr(model, "embed_ids", wait)


def post_in_threads(url, bodies):
    """Statuses, and Retry-After headers, of requests that are sent at once."""
    answers = []

    def post(body):
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        connection.request("POST", "/v1/embeddings", json.dumps(body))
        answer = connection.getresponse()
        answer.read()
        answers.append((answer.status, answer.headers["retry-after"]))

    threads = [threading.Thread(target=post, args=[body]) for body in bodies]
    for thread in threads:
        thread.start()
    return threads, answers


def test_a_full_queue_is_status_429_and_never_an_error_of_the_server(model, monkeypatch):
    gate = Gate(monkeypatch, model)
    with run_in_thread(create_server(make_app(model, replace(LIMITS, max_queue=64)), limit_concurrency=None)) as url:
        threads, answers = post_in_threads(url, [{"input": [f"text {n}"] * 8} for n in range(40)])
        assert gate.reached.wait(120)
        while len(answers) < 40 - (64 + 32) // 8:
            time.sleep(0.01)
        gate.opened.set()
        for thread in threads:
            thread.join(120)
    assert {status for status, _ in answers} == {200, 429}
    assert all(int(wait) >= 1 for status, wait in answers if status == 429)


def test_bodies_of_all_requests_together_are_bounded(model, monkeypatch):
    monkeypatch.setattr(Limits, "max_bytes_in_flight", 100_000)
    gate = Gate(monkeypatch, model)
    with run_in_thread(create_server(make_app(model), limit_concurrency=None)) as url:
        threads, answers = post_in_threads(url, [{"input": "a", "filler": "x" * 30_000} for _ in range(8)])
        while len(answers) < 5:
            time.sleep(0.01)
        gate.opened.set()
        for thread in threads:
            thread.join(120)
    assert sorted(status for status, _ in answers) == [200] * 3 + [429] * 5


def test_a_request_in_flight_is_answered_while_the_server_stops(model, monkeypatch):
    gate, running = Gate(monkeypatch, model), create_server(make_app(model), timeout_graceful_shutdown=120)
    with run_in_thread(running) as url:
        threads, answers = post_in_threads(url, [{"input": "a"}])
        assert gate.reached.wait(120)
        running.should_exit = True
        time.sleep(0.3)
        assert not answers
        gate.opened.set()
        threads[0].join(120)
    assert answers == [(200, None)]


def test_what_a_client_that_left_has_asked_for_is_not_encoded(model, monkeypatch):
    gate, engine = Gate(monkeypatch, model), Engine(model, LIMITS)
    queue, app = engine.texts, make_app(model, engine=engine)
    with run_in_thread(create_server(app, limit_concurrency=None)) as url:
        threads, _ = post_in_threads(url, [{"input": ["a"] * 32}])
        assert gate.reached.wait(120)
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        connection.request("POST", "/v1/embeddings", json.dumps({"input": ["b"] * 50}))
        while queue.queued < 50:
            time.sleep(0.01)
        connection.sock.close()
        while not queue.jobs[0].future.cancelled():
            time.sleep(0.01)
        gate.opened.set()
        threads[0].join(120)
    assert queue.queued == 0


def test_malformed_images_are_never_an_error_of_the_server(client):
    rng, picture, statuses = random.Random(0), Image.open(io.BytesIO(PHOTOS[0])), set()
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM", "TGA", "ICO", "JPEG2000"):
        file = io.BytesIO()
        picture.save(file, kind)
        for _ in range(25):
            body = {"input": data_uri(mutated(file.getvalue(), rng)), "modality": "image"}
            statuses.add(client.post("/v1/embeddings", json=body).status_code)
    assert {200, 400} <= statuses <= {200, 400, 413}


def operations():
    client = TestClient(make_app(None), base_url="http://127.0.0.1")
    paths = client.get("/openapi.json").json()["paths"]
    return [(path, method.upper()) for path, methods in paths.items() for method in methods]


OPERATIONS = operations()


def test_the_schema_names_every_endpoint():
    assert {path for path, _ in OPERATIONS} == {
        *("/v1/embeddings", "/embeddings", "/v2/embed", "/v1/classify", "/", "/v1/search", "/predict"),
        *("/v1/models", "/v1/models/{name}", "/health", "/ping", "/metrics"),
    }


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_conforms_to_the_published_schema(model, path, method, token):
    app = make_app(model, token=token, index=Index())
    headers = {"host": "127.0.0.1", **({"authorization": f"Bearer {token}"} if token else {})}
    operation = schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)[path][method]
    modes = list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

    @seed(0)
    @settings(
        max_examples=25, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=cases)
    def check(case):
        response = case.call(headers=headers)
        case.validate_response(response, checks=SCHEMA_CHECKS, headers=headers)

    check()


def test_with_a_token_every_path_needs_it(model):
    client = TestClient(make_app(model, token=TOKEN), base_url="http://laptop:8266", follow_redirects=False)
    for path in ("/", "/docs", "/health", "/ping", "/metrics", "/openapi.json", "/v1/models"):
        assert client.get(path).status_code == 401, path
    for headers, status in (
        ({"authorization": f"Bearer {TOKEN}"}, 200),
        ({"authorization": "Bearer x"}, 401),
        ({}, 401),
    ):
        assert client.post("/v1/embeddings", json={"input": "a"}, headers=headers).status_code == status
    statuses = [client.get("/v1/models", headers={"authorization": "Bearer x"}).status_code for _ in range(12)]
    assert statuses[-1] == 429
    assert client.get("/v1/models", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 429


def test_without_a_token_other_host_names_and_other_sites_are_refused(model):
    client = TestClient(make_app(model), base_url="http://127.0.0.1")
    post = {"json": {"input": "a"}}
    assert client.post("/v1/embeddings", **post, headers={"host": "evil.example"}).status_code == 421
    assert client.post("/v1/embeddings", **post, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    answer = client.post("/v1/embeddings", **post, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_the_access_log_has_a_line_for_each_request_without_tokens_and_texts(model):
    written, headers = [], {"authorization": f"Bearer {TOKEN}"}
    app = make_app(model, token=TOKEN, log=LineWriter(written.append))
    with TestClient(app, base_url="http://laptop", follow_redirects=False) as client:
        client.post("/v1/embeddings", json={"input": ["my secret text"] * 3}, headers=headers)
        client.get(f"/?token={TOKEN}")
        client.get("/%0a%22x")
    lines = b"".join(written).decode().splitlines()
    records = list(map(json.loads, lines))
    assert [record["status"] for record in records] == [200, 303, 404]
    assert records[0].keys() == {"time", "client", "method", "path", "status", "ms", "items", "bytes"}
    assert (records[0]["path"], records[0]["items"], records[0]["bytes"] > 50) == ("/v1/embeddings", 3, True)
    assert not any(secret in line for secret in ("secret", TOKEN) for line in lines)


def test_the_openai_client(address, model):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{address}v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    assert_same([each.embedding for each in answer.data], model.encode_text(TEXTS))
    answer = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float", dimensions=8)
    assert len(answer.data[0].embedding) == 8
    answer = client.embeddings.create(model="tiny", input=URIS, extra_body={"modality": "image"})
    assert_same([each.embedding for each in answer.data], model.encode_image(PHOTOS))
    assert [each.id for each in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="dimensions must be at most 24, not 99"):
        client.embeddings.create(model="tiny", input="a", dimensions=99)


def test_the_cohere_client(address, model):
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="none", base_url=address.rstrip("/"))
    kind = {"model": "tiny", "input_type": "search_document", "embedding_types": ["float", "ubinary"]}
    assert_same(client.embed(texts=TEXTS, **kind).embeddings.float_, model.encode_text(TEXTS))
    answer = client.embed(images=URIS[:1], **{**kind, "input_type": "image"})
    assert_same(answer.embeddings.float_, model.encode_image(PHOTOS[:1]))
    assert len(answer.embeddings.ubinary[0]) == 3
    with pytest.raises(cohere.BadRequestError, match="an empty text"):
        client.embed(texts=[" "], **kind)


def test_the_hugging_face_client(address, model):
    hub = pytest.importorskip("huggingface_hub")
    client = hub.InferenceClient(model=address.rstrip("/"))
    answer = client.zero_shot_image_classification(PHOTOS[0], candidate_labels=["cat", "dog"])
    (expected,) = model.classify(PHOTOS[0], ["cat", "dog"])
    assert answer[0].label == expected.label
    assert answer[0].score == pytest.approx(expected.probability, abs=1e-5)


def test_curl(address, model, tmp_path):
    def curl(*words):
        return json.loads(subprocess.run(["curl", "-s", *words], capture_output=True, check=True, timeout=120).stdout)

    answer = curl(f"{address}v1/embeddings", "-d", '{"input": "a red cat"}')
    assert_same([answer["data"][0]["embedding"]], model.encode_text("a red cat"))
    (tmp_path / "photo.jpg").write_bytes(PHOTOS[0])
    form = ["-F", 'entries={"clip": {"visual": {"modelName": "x"}}}', "-F", f"image=@{tmp_path}/photo.jpg"]
    assert_same([json.loads(curl(f"{address}predict", *form)["clip"])], model.encode_image(PHOTOS[0]))


@contextmanager
def started(folder, *flags, program=("-m", "m1clip")):
    """The command as a process, and its address."""
    command = [sys.executable, *program, "serve", str(folder), "--port", "18566", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), line + process.stderr.read()
        yield process, line.split(" at ")[1].split()[0]
    finally:
        process.kill()
        process.wait(120)


def ask(address, text="a red cat", token=None):
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request("POST", "/v1/embeddings", json.dumps({"input": text}), headers)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return body["data"][0]["embedding"] if answer.status == 200 else body


WITHOUT_TORCH = """
import atexit, sys
from m1clip.cli import main
atexit.register(lambda: print("without torch" if "torch" not in sys.modules else "with torch"))
main()
"""


def test_the_command_serves_without_torch_and_stops_on_a_signal(tiny_onnx, model):
    with started(tiny_onnx, program=("-c", WITHOUT_TORCH)) as (process, address):
        assert_same([ask(address)], model.encode_text("a red cat"))
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    lines = output.splitlines()
    assert json.loads(lines[-2])["path"] == "/v1/embeddings"
    assert lines[-1] == "without torch"


def test_a_token_in_a_file_is_shown_neither_by_ps_nor_in_the_log(tiny_onnx, tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    with started(tiny_onnx, "--token", f"@{tmp_path}/token") as (process, address):
        assert TOKEN not in address
        assert len(ask(address, token=TOKEN)) == 24
        with pytest.raises(json.JSONDecodeError):  # "a token is needed"
            ask(address)
        process.send_signal(signal.SIGTERM)
        assert TOKEN not in process.communicate(timeout=120)[0]


def test_a_second_ctrl_c_ends_the_server_at_once_without_a_traceback(tiny_onnx):
    with started(tiny_onnx) as (process, address):
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)
        connection.putrequest("POST", "/v1/embeddings")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")  # a request that never ends
        ask(address)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in errors) == (0, False), errors


def test_a_request_that_takes_longer_than_the_shutdown_is_answered(model, monkeypatch):
    gate, running = Gate(monkeypatch, model), create_server(make_app(model), timeout_graceful_shutdown=1)
    with run_in_thread(running) as url:
        threads, answers = post_in_threads(url, [{"input": "a"}])
        assert gate.reached.wait(120)
        running.should_exit = True
        threads[0].join(120)
        gate.opened.set()
    assert answers == [(503, "5")]


def test_onnxruntime_reports_nothing_to_its_vendor(tiny_onnx, tmp_path):
    """Its telemetry keeps the number of this device and what it will send in the cache folder of the user."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "XDG_CACHE_HOME")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    code = f"import m1clip; m1clip.load({str(tiny_onnx)!r}).encode_text('a cat')"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    assert not [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name]


def test_a_worker_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(server, "KILL_S", 0.1)
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    workers = server.Workers.__new__(server.Workers)
    workers.config = server.server_config(None, timeout_graceful_shutdown=0)
    workers.processes = [SimpleNamespace(process=process)]
    workers.join_all()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_workers_share_a_socket_are_replaced_and_end_with_their_parent(tiny_onnx, model):
    with started(tiny_onnx, "--workers", "2", "--no-access-log") as (process, address):
        workers = server_processes(process)
        assert len(workers) == 2
        for _ in range(20):
            assert_same([ask(address)], model.encode_text("a red cat"))
        workers[0].kill()
        while len(server_processes(process)) < 2 or workers[0] in server_processes(process):
            time.sleep(0.1)
        assert_same([ask(address)], model.encode_text("a red cat"))
        workers = server_processes(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert not psutil.wait_procs(workers, 120)[1]
    with started(tiny_onnx, "--workers", "2") as (process, address):
        workers = server_processes(process)
        process.kill()
        assert not psutil.wait_procs(workers, 120)[1]


def server_processes(process):
    """Its worker processes; Python's resource tracker is another child."""
    with suppress(psutil.ZombieProcess):
        children = psutil.Process(process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return []  # one has just died


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "shows the model to other machines: it needs a --token"),
        (["--max-queue", "5"], "--max-queue must be at least --max-batch (2048)"),
        (["--token", "@missing"], "missing: No such file"),
        (["--token", "@export.json"], "--token must be ASCII without spaces"),
        (["--workers", "0"], "--workers must be 1–256, not 0"),
        (["--max-mb", "0"], "--max-mb must be 0.001–2000, not 0"),
        (["--allow", "links"], "--allow must be urls"),
        (["--search", "photos"], "there is no folder photos"),
    ],
)
def test_wrong_flags_are_one_sentence(tiny_onnx, capsys, monkeypatch, flags, words):
    monkeypatch.chdir(tiny_onnx)
    assert cli.run_command(["serve", str(tiny_onnx), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_model_that_is_damaged_is_one_sentence(tiny_onnx, tmp_path, capsys):
    for file in tiny_onnx.iterdir():
        os.link(file, tmp_path / file.name)
    (tmp_path / "vision_model.onnx").unlink()
    for flags in ([], ["--workers", "2"]):
        assert cli.run_command(["serve", str(tmp_path), *flags]) == 2
        assert "vision_model.onnx is missing: export it again" in capsys.readouterr().err


def test_the_deployment_files_of_the_documentation():
    root = Path(__file__).parent.parent
    blocks = re.findall(r"^```console\n(.*?)^```$", (root / "docs" / "serve.md").read_text(), re.M | re.S)
    agent = plistlib.loads(next(block for block in blocks if block.startswith("<?xml")).encode())
    unit = next(block for block in blocks if block.startswith("[Unit]"))
    started = re.search(r"ExecStart=(.*)", unit)[1].replace("@%d/", "").split()
    image = next(block for block in blocks if block.startswith("FROM"))
    entry = json.loads(re.search(r"ENTRYPOINT (.*)", image)[1].replace("@", ""))
    for command in (agent["ProgramArguments"][1:], started[1:], entry[1:]):
        assert parse_flags(serve_command.Args, "m1clip serve", command[1:]).model
    packages = [re.findall(r"'([\w-]+[>=<.,\d]*)'", block) for block in blocks if "'onnxruntime>=" in block]
    assert packages[0] == packages[1]
    assert {*packages[0]} <= {*tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]}
