"""The pages as a person meets them, in headless Chromium: the page of the server, and the curves of trainings."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from browser import NEEDS_BROWSER, chromium, requested
from stickymoe.cli import main
from stickymoe.serving.monitor import make_app
from stickymoe.serving.server import bind, url_of
from stickymoe.serving.worker import Limits

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def browser():
    with chromium(1280, 1000) as driver:
        yield driver


@pytest.fixture
def page(browser, server):
    browser.get(server.url)
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".column"))
    requested(browser)
    browser.get_log("browser")  # what earlier tests left
    return browser


def wait(browser, condition):
    return WebDriverWait(browser, 60).until(lambda _: condition())


def find(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def fill(browser, name, text):
    field = browser.find_element(By.ID, name)
    field.clear()
    field.send_keys(str(text))


def ask(browser, prompt="The area", tokens=24):
    fill(browser, "prompt", prompt)
    fill(browser, "max-tokens", tokens)
    browser.find_element(By.ID, "run").click()


def done(browser):
    states = [column.get_attribute("data-state") for column in find(browser, ".column")]
    return all(state == "done" for state in states)


def speed(browser, column=0):
    return float(find(browser, ".m-speed")[column].text.split()[0].replace(",", ""))


def quiet(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"]


def test_an_answer_grows_as_a_ribbon_and_slots_change(page, server):
    ask(page)
    wait(page, lambda: done(page))
    tokens = find(page, ".column .token")
    assert len(tokens) == 24
    assert "".join(page.execute_script("return [...document.querySelectorAll('.token')].map(t => t.textContent)"))
    assert find(page, ".token.load")
    assert {token.get_attribute("data-expert") for token in tokens} <= set("01234")
    boxes = [box.text for box in find(page, ".slot")]
    assert len(boxes) == 4 * 2
    Select(page.find_element(By.ID, "layer")).select_by_index(3)

    page.find_element(By.ID, "step").send_keys(Keys.HOME)
    wait(page, lambda: page.find_element(By.ID, "position").text == "token 1 of 24")
    seen = []
    for _ in range(23):
        page.find_element(By.ID, "next").click()
        seen.append([box.text for box in find(page, ".slot")])
    assert seen[-1] == boxes
    assert len({tuple(row) for row in seen}) > 1
    assert quiet(page) == []
    assert {url.split("/")[2] for url in requested(page) if url.startswith("http")} == {server.url.split("/")[2]}


def test_two_models_answer_side_by_side_and_a_throttle_slows_one(page):
    Select(page.find_element(By.ID, "compare")).select_by_visible_text("vanilla")
    wait(page, lambda: len(find(page, ".column")) == 2)
    throttle = Select(find(page, ".column .throttle")[1])
    throttle.select_by_index(len(throttle.options) - 1)
    page.find_element(By.ID, "in-turn").click()
    ask(page)
    wait(page, lambda: done(page) and len(find(page, ".token")) == 48)
    texts = page.execute_script(
        "return [...document.querySelectorAll('.ribbon')].map(r => [...r.children].map(t => t.textContent).join(''))"
    )
    assert texts[0] == texts[1]  # the same model: slow memory does not change the text
    assert speed(page, 1) < speed(page, 0)
    assert quiet(page) == []


def test_an_answer_can_be_stopped_and_replayed(page, server):
    throttle = Select(find(page, ".throttle")[0])
    throttle.select_by_index(len(throttle.options) - 1)
    ask(page, tokens=50)
    wait(page, lambda: len(find(page, ".token")) > 1)
    page.find_element(By.ID, "stop").click()
    wait(page, lambda: page.find_element(By.ID, "message").text == "Stopped.")
    assert find(page, ".state")[0].text == "stopped"
    assert page.find_element(By.ID, "play").is_enabled()
    wait(page, lambda: server.workers["vanilla"].running == 0)
    assert quiet(page) == []


def test_the_page_works_with_the_keyboard(page):
    field = page.find_element(By.ID, "prompt")
    fill(page, "max-tokens", 5)
    field.clear()
    field.send_keys("Hello")
    ActionChains(page).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
    wait(page, lambda: done(page) and len(find(page, ".token")) == 5)
    unnamed = page.execute_script(
        "return [...document.querySelectorAll('input,select,textarea,button')]"
        ".filter(e => e.checkVisibility() && !e.labels?.length)"
        ".filter(e => !e.getAttribute('aria-label') && !e.textContent.trim())"
        ".map(e => e.outerHTML)"
    )
    assert unnamed == []


def test_a_mistake_is_shown_in_one_line(page):
    ask(page, "a" * 100)
    message = page.find_element(By.ID, "message")
    wait(page, lambda: "reads at most 64" in message.text)
    ask(page, "a", 3)
    wait(page, lambda: done(page) and len(find(page, ".token")) == 3)


def test_a_connection_that_breaks_is_shown_in_one_line(page):
    broken = "window.fetch = async () => new Response(new ReadableStream({pull: c => c.error(new TypeError('x'))}))"
    page.execute_script(broken)
    ask(page)
    wait(page, lambda: "The answer ended early" in page.find_element(By.ID, "message").text)
    assert find(page, ".state")[0].text == "failed"
    assert quiet(page) == []


def test_the_controls_begin_with_what_the_server_was_started_with(browser, serve, models):
    with serve({"vanilla": models["vanilla"]}, Limits(max_tokens=8), throttle=5_000_000) as server:
        browser.get(server.url)
        wait(browser, lambda: find(browser, ".column"))
        throttle = Select(find(browser, ".throttle")[0])
        assert throttle.first_selected_option.text == "5 MB/s"
        names = [option.text for option in throttle.options]
        assert names[:6] == ["off", "1 GB/s", "200 MB/s", "50 MB/s", "10 MB/s", "5 MB/s"]
        browser.find_element(By.ID, "run").click()
        wait(browser, lambda: done(browser))
        assert len(find(browser, ".token")) == 8
    browser.get_log("browser")


def test_a_model_without_experts_answers(page):
    Select(page.find_element(By.ID, "model")).select_by_visible_text("dense")
    ask(page, "The", 5)
    wait(page, lambda: done(page))
    assert not find(page, ".slot")
    # The time is that of the server: events may arrive together.
    times = page.execute_script("return performance.getEntriesByName(location.origin + '/v1/completions')[0].duration")
    assert speed(page) > 4 / (times / 1000)
    assert quiet(page) == []


def test_a_key_is_asked_for(browser, serve, models):
    with serve({"vanilla": models["vanilla"]}, key="secret") as server:
        browser.get(server.url)
        key, message = browser.find_element(By.ID, "key"), browser.find_element(By.ID, "message")
        wait(browser, lambda: key.is_displayed() and message.text == "This server asks for a key.")
        for wrong, answer in (("ключ", "The key is wrong: it has only printable ASCII"), ("sec", "The key is wrong.")):
            key.send_keys(wrong, Keys.ENTER)
            wait(browser, lambda answer=answer: message.text.startswith(answer))
            key.clear()
        assert not browser.find_element(By.ID, "run").is_displayed()
        key.send_keys("secret", Keys.ENTER)
        wait(browser, lambda: find(browser, ".column"))
        ask(browser, "The", 4)
        wait(browser, lambda: done(browser))
    browser.get_log("browser")


# Curves


@contextmanager
def monitored(folder):
    with bind("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(make_app(folder, hosts=("127.0.0.1",)), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def test_curves_grow_while_a_run_writes(browser, corpus, tmp_path):
    settings = ["--preset", "tiny", "--data.path", str(corpus), "--data.vocab_size", "300", "--train.steps", "12"]
    settings += ["--train.log_every", "2", "--train.eval_every", "6"]
    assert main(["train", *settings, "--variant", "soft", "--out", str(tmp_path / "runs" / "soft")]) == 0
    metrics = tmp_path / "runs" / "soft" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:3]))

    def points(series="train.loss"):
        # In one script: the page may replace the element between two.
        script = "return document.querySelector(arguments[0])?.getAttribute('d') ?? ''"
        return len(re.findall("[ML]", browser.execute_script(script, f"[data-series='{series}'] path")))

    browser.get_log("browser")
    with monitored(tmp_path / "runs") as url:
        browser.get(url)
        wait(browser, points)
        before = points()
        assert before <= 3
        with metrics.open("a") as file:
            file.write("".join(lines[3:]) + '{"step": 9')  # the last line is not complete
        wait(browser, lambda: points() > before)
        (row,) = find(browser, "#runs tbody tr")
        assert "soft" in row.text
        assert "complete" in row.text
        assert "12 / 12" in row.text
        browser.find_element(By.ID, "smooth").click()
        assert points() == sum("train" in json.loads(line) for line in lines)
        find(browser, "#runs input")[0].click()
        wait(browser, lambda: points() == 0 or not find(browser, "[data-series='train.loss']")[0].is_displayed())
        assert quiet(browser) == []
        assert {u.split("/")[2] for u in requested(browser) if u.startswith("http")} >= {url.split("/")[2]}
    wait(browser, lambda: "Not connected" in browser.find_element(By.ID, "message").text)
    browser.get("about:blank")
    browser.get_log("browser")
