"""The image chat's page in a real browser: Debian's chromium, headless."""

import base64
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.picture_chat import LAYERS, make_picture_chat

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("no browser: apt-get install chromium chromium-driver", allow_module_level=True)
if importlib.util.find_spec("gradio") is None:  # the server imports it
    pytest.skip("the demo needs gradio: pip install 'mmkv[demo]'", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver")

Keys = webdriver.Keys

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.slow]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Without a GPU each frame that the browser draws costs much time, so the editor gets two a second,
# and nothing is animated.
FRAME = 0.5  # seconds
FEW_FRAMES = """
requestAnimationFrame = draw => setTimeout(() => draw(performance.now()), PAUSE);
cancelAnimationFrame = clearTimeout;
addEventListener('DOMContentLoaded', () => {
  const still = document.createElement('style');
  still.textContent = '*, *::before, *::after { animation: none !important; '
    + 'transition: none !important; }';
  document.head.append(still);
});
""".replace("PAUSE", str(1000 * FRAME))
PATIENCE = 60  # seconds
MESSAGE = "#problem .mm-error"
ANSWERS = ".mm-answer[data-done=true]"


@pytest.fixture(scope="module")
def server(tmp_path_factory, request):
    """The address of `mmkv demo` with a tiny model; it has to leave nothing behind."""
    folder, model = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("tiny")
    for part in make_picture_chat():
        part.save_pretrained(model)
    command = [str(Path(sys.executable).parent / "mmkv"), "demo", "--port", "0", "--device", "cpu"]
    command += ["--model", str(model)]
    env = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    request.getfixturevalue("browser")  # both take long to start
    line = process.stdout.readline()
    assert "http://127.0.0.1:" in line, line
    try:
        yield line.split(" at ")[1].split()[0].rstrip("/")
    except BaseException:
        process.kill()
        raise
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": FEW_FRAMES})
    # The browser's own start page asks for its parts: what is counted begins after it.
    driver.get("about:blank")
    asked_for(driver)
    yield driver
    driver.quit()


def asked_for(browser):
    """The addresses that pages requested since the last call."""
    events = [json.loads(x["message"])["message"] for x in browser.get_log("performance")]
    sent = [x["params"] for x in events if x["method"] == "Network.requestWillBeSent"]
    return {x["request"]["url"] for x in sent}


class Page:
    """What a user does in one tab."""

    def __init__(self, browser):
        self.browser = browser

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def until(self, what, why):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                if found := what():
                    return found
            except Exception as error:
                why = f"{why} ({type(error).__name__})"[:500]
            time.sleep(0.1)
        pytest.fail(f"not within {PATIENCE} s: {why}; the page says {self.text(MESSAGE)!r}")

    def text(self, selector):
        return " ".join(x.text for x in self.all(selector))

    def click(self, selector, index=0):
        def clicked():
            self.browser.execute_script("arguments[0].click()", self.all(selector)[index])
            return True

        self.until(clicked, f"click {selector}")

    def choose_example(self, index):
        self.click("#examples button", index)
        self.until(self.shows_picture, "the example in the editor")

    def shows_picture(self):
        """The editor offers to undo what put a picture into it."""
        (undo,) = self.all("#picture button[title=Undo]")
        return undo.is_enabled()

    def draw(self):
        """A stroke across the middle."""
        self.click("#picture button[title=Brush]")
        time.sleep(3 * FRAME)
        mouse = webdriver.ActionChains(self.browser)
        mouse.move_to_element_with_offset(self.all("#picture canvas")[0], -60, 60).click_and_hold()
        mouse.move_by_offset(60, 0).move_by_offset(60, 0).release().perform()
        self.until(self.shows_picture, "a stroke")
        time.sleep(3 * FRAME)

    def type(self, text):
        field = self.all("#question textarea")[0]
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(Keys.DELETE)
        field.send_keys(text)

    def ask(self, text):
        if text:
            self.type(text)
        self.until(lambda: self.all("#ask")[0].is_enabled(), "Ask to be ready")
        self.click("#ask")

    def answered(self, turns):
        self.until(
            lambda: len(self.all(ANSWERS)) == 2 * turns and self.all("#ask")[0].is_enabled(),
            f"{turns} turns to be answered",
        )
        return [x.text for x in self.all(ANSWERS)[:2]]  # the newest come first

    def set_number(self, selector, value):
        self.until(lambda: self.all(selector), f"the field {selector}")
        field = self.all(selector)[0]
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", field)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(str(value), Keys.TAB)

    def shorten_answers(self):
        """Limit answers to 12 tokens, as the browser draws each of them."""
        self.click("#settings button.label-wrap", 0)
        self.set_number("input[type=number][aria-label*='Max new tokens']", 12)

    def without_floor(self):
        """A share of the tokens of the short example is what the tests look at."""
        self.click("#unit input", 1)
        self.until(lambda: "at least 64 tokens" in self.text("#settings"), "the floor")
        self.click("#settings button.label-wrap", 1)
        self.set_number("#option-least input", 0)
        self.until(lambda: "at least" not in self.text("#settings"), "no floor")

    def refused(self, part):
        self.until(lambda: part in self.text(MESSAGE), f"a message with {part!r}")
        assert "Traceback" not in self.browser.page_source

    def width(self, width, height=900):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def save(self, name):
        """A picture of the whole page, for people: where MMKV_SCREENSHOTS says."""
        if where := os.environ.get("MMKV_SCREENSHOTS"):
            width = self.browser.execute_script("return innerWidth")
            self.width(width, self.browser.execute_script("return document.body.scrollHeight"))
            time.sleep(0.5)
            self.browser.save_screenshot(str(Path(where) / name))
            self.width(width)


def opened(browser, server):
    page = Page(browser)
    browser.get(server)
    page.until(lambda: page.all("#ask") and page.all("#examples button[aria-label]"), "the page")
    page.until(lambda: page.all("#picture canvas"), "the editor")
    return page


@pytest.fixture
def page(server, browser):
    fresh = opened(browser, server)
    fresh.width(1280)
    return fresh


def test_two_turns_layers_and_another_policy(page):
    page.choose_example(0)
    page.shorten_answers()
    page.without_floor()
    page.ask("Describe the picture.")
    full, compressed = page.answered(1)
    assert full
    assert compressed
    assert page.text(".mm-side h3") == "Full cache condense 0.125"
    assert page.all("#question textarea")[0].get_attribute("value") == "Describe the picture."
    assert "least=0" in page.text("#talk .mm-question small")
    numbers = [x.text for x in page.all(".mm-numbers dd")]
    assert numbers[0].endswith("ms")
    assert numbers[1].endswith("tokens/s")
    assert numbers[2] == "100%"
    assert int(numbers[5].rstrip("%")) < 50
    shares = [int(x.get_attribute("aria-valuenow")) for x in page.all(".mm-side [role=meter]")]
    assert shares[0] == 100
    assert shares[1] < 60
    assert "ROUGE-L" in page.text(".mm-note")

    first = page.text(".mm-lit figcaption")
    assert first.startswith("Layer 0: ")
    slider = page.all("#layer input[type=range]")[0]
    assert slider.get_attribute("max") == str(LAYERS - 1)
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.until(lambda: page.text(".mm-lit figcaption").startswith("Layer 2: "), "layer 2")
    page.set_number("#layer input[type=number]", 0.1)
    page.until(lambda: page.text(".mm-lit figcaption").startswith("Layer 0: "), "layer 0")
    assert page.text(".mm-heat figcaption").startswith("All layers: ")
    assert len(page.all("#bars tbody tr")) == LAYERS
    assert "Describe the picture." in page.text(".mm-words")
    assert "144 tokens" in page.text(".mm-picture")

    field = page.all("#policy input")[0]
    field.click()
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("streaming", Keys.ENTER)
    page.click("#settings button.label-wrap", 1)
    page.until(
        lambda: page.all("#option-sinks input") and not page.all("#option-window input"),
        "the options of another policy",
    )
    before = [page.all("#outcome")[0].rect["y"]]
    page.ask("How many objects are in the picture?")
    page.answered(2)
    assert page.text("#talk .mm-compressed h3") == "streaming 0.125"
    assert "read the whole conversation again" in page.text("#talk .mm-turn")
    assert page.text("#earlier .mm-compressed h3") == "condense 0.125"
    assert [page.all("#outcome")[0].rect["y"]] == pytest.approx(before, abs=20)
    page.save("demo-1280.png")

    page.click("#clear")
    page.until(lambda: page.all(".mm-empty"), "an empty page")
    page.draw()  # on the picture, which is still there
    page.ask("Describe the picture.")
    page.answered(1)
    assert shows_red(page)


def shows_red(page):
    """Whether a red stroke is in the picture of the first question."""
    uri = page.all(".mm-question img")[0].get_attribute("src")
    drawn = Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))).convert("RGB")
    r, g, b = np.asarray(drawn).transpose(2, 0, 1)
    return ((r > 180) & (g < 80) & (b < 80)).sum() > 20


def test_errors_show_in_the_page(page, tmp_path):
    """And what comes right after it is answered: an uploaded picture, and a budget too small."""
    (tmp_path / "broken.png").write_text("no picture")
    page.all("#picture input[type=file]")[0].send_keys(str(tmp_path / "broken.png"))
    page.until(lambda: "cannot be read" in page.text("#unreadable"), "what cannot be read")
    page.ask("Describe the picture.")
    page.refused("There is no picture yet")
    path = tmp_path / "red.jpg"
    Image.new("RGB", (300, 200), "red").save(path)
    page.all("#picture input[type=file]")[0].send_keys(str(path))
    page.until(page.shows_picture, "the upload in the editor")
    page.type("   ")
    page.ask("")
    page.refused("The question is empty")
    page.shorten_answers()
    page.without_floor()
    page.set_number("input[type=number][aria-label*='Budget']", 0.01)
    page.click("#protect input")
    page.ask("Describe the picture.")
    assert page.answered(1)[0]
    assert page.text(MESSAGE) == ""
    assert "too few for sinks 1, protected text" in page.text(".mm-note")
    assert shows_red(page)


def test_stop_ends_the_answers(page):
    page.draw()  # on an empty sheet
    page.click("#settings button.label-wrap", 0)
    page.set_number("input[type=number][aria-label*='Max new tokens']", 512)
    page.set_number("input[type=number][aria-label*='Temperature']", 2)
    page.ask("Describe the picture.")
    page.until(lambda: page.all("#stop")[0].is_enabled(), "an answer to stop")
    page.until(lambda: page.text(".mm-full .mm-answer"), "the first word")
    page.click("#stop")
    page.answered(1)
    assert "Stopped before the end." in page.text(".mm-note")
    assert not page.all("#stop")[0].is_enabled()
    assert shows_red(page)


def test_clear_during_an_answer_leaves_an_empty_page(page):
    page.choose_example(0)
    page.click("#settings button.label-wrap", 0)
    page.set_number("input[type=number][aria-label*='Max new tokens']", 512)
    page.ask("Describe the picture.")
    page.until(lambda: page.text(".mm-full .mm-answer"), "the first word")
    page.click("#clear")
    page.until(lambda: page.all(".mm-empty"), "an empty page")
    time.sleep(2)  # until the answer has ended
    assert page.all(".mm-empty")
    assert not page.all(".mm-turn")


def test_the_page_fits_and_every_control_has_a_name(browser, server):
    def emulate(scheme):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        page = opened(browser, server)
        dark = browser.execute_script("return document.body.classList.contains('dark')")
        assert dark == (scheme == "dark")
        return page

    emulate("dark").save("demo-1280-dark.png")
    page = emulate("light")
    of_main = [page.all("#main")[0].rect["width"]]
    page.choose_example(0)
    page.shorten_answers()
    page.ask("Describe the picture.")
    page.answered(1)
    assert [page.all("#main")[0].rect["width"]] == of_main
    for width in (1280, 390):
        page.width(width)
        page.until(
            lambda width=width: browser.execute_script("return innerWidth") == width, "the width"
        )
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        tops = [x.rect["y"] for x in page.all(".mm-side")]
        assert (tops[0] == tops[1]) == (width == 1280)
        if width == 390:
            assert page.all("#settings")[0].rect["y"] < tops[0]
        tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        roles = "button textbox slider spinbutton checkbox combobox listbox meter".split()  # noqa: SIM905
        controls = [x for x in tree if not x["ignored"] and x.get("role", {}).get("value") in roles]
        unnamed = [x["role"]["value"] for x in controls if not x.get("name", {}).get("value")]
        assert len(controls) > 20
        assert unnamed == []
        assert page.all("img:not([alt])") == []
        page.save(f"demo-{width}-light.png")


def test_nothing_leaves_this_computer(browser, server):
    """Neither fonts nor scripts nor counters: every request of this session stayed here."""
    urls = asked_for(browser)
    assert any(x.startswith(server) for x in urls)
    local = ("http://127.0.0.1:", "http://localhost:", "data:", "blob:")
    assert {x for x in urls if not x.startswith(local)} == set()
    severe = [x["message"] for x in browser.get_log("browser") if x["level"] == "SEVERE"]
    assert severe == []


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        f"/gradio_api/file={Path(__file__).resolve()}",
        "/gradio_api/file=../../../../etc/passwd",
        "/gradio_api/file=https://example.org/",
        "/file=/etc/passwd",
        "/static/../../../../../etc/passwd",
    ],
)
def test_no_other_file_can_be_read(server, path):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(server + path, timeout=10)
    assert error.value.code in (403, 404)


def test_the_server_listens_on_loopback_only(server):
    port = int(server.rsplit(":", 1)[1])
    rows = [x.split() for x in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {x[1] for x in rows if x[3] == "0A" and int(x[1].split(":")[1], 16) == port}
    assert listening == {f"0100007F:{port:04X}"}
