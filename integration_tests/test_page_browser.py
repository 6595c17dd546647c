"""The live page in a real browser: it shows what happens, acts only when told to, and can be read by everybody."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.browser import (
    NARROW,
    WIDE,
    await_text,
    browser,
    click,
    complaints,
    shown,
    text_of,
    type_into,
    with_browser,
)
from integration_tests.pages import TOKEN, paged_coordinator, read_page
from integration_tests.patience import eventually
from rollbridge.client.connection import Bridge
from rollbridge.errors import TransactionAbortedError

HOSTILE = "<script>document.title='executed'</script><img src=x onerror=\"document.title='executed'\">"
TURNED = "\u202eon\u2066\x1b[31m"
SHOWN = "\ufffdon\ufffd\ufffd[31m"
SCREENSHOT = "ROLLBRIDGE_PAGE_SCREENSHOT"
"""Variable that says where the picture of the README is to be written."""

pytestmark = with_browser


@pytest.fixture
def orders(unique_name: Callable[[str], str]) -> str:
    """A stream in a scope of the test's own."""
    return f"{unique_name('sales')}/orders"


@pytest.fixture
def page(cluster: AnyCluster, root: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a coordinator's page."""
    with paged_coordinator(cluster, root, "one", tmp_path) as (url, _):
        yield url


@pytest.fixture
def client(cluster: AnyCluster, root: str, page: str) -> Iterator[Bridge]:
    """A client, once somebody can lead."""
    eventually(lambda: read_page(page, "overview")["coordinator"]["healthy"], "it is there")
    with rollbridge.connect(
        cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root, client_name="importer"
    ) as b:
        yield b


def unlock(driver: WebDriver, token: str = TOKEN) -> None:
    """Give the page its token."""
    click(driver, "#unlock")
    type_into(driver, "#dialog-fields input", token)
    click(driver, "#dialog-go")


def test_what_happens_appears_and_changes_without_a_reload(
    client: Bridge, orders: str, page: str, tmp_path: Path
) -> None:
    with browser(tmp_path / "profile") as driver:
        driver.get(page)
        driver.execute_script("window.loadedOnce = true")
        await_text(driver, "#where", "coordinator one")
        client.admin.create_stream(orders, segments=2)
        await_text(driver, "#groups", f"{orders.partition('/')[0]}/default")
        await_text(driver, "#groups", "one, here")
        await_text(driver, "#streams", orders)
        txn = client.begin(orders, label="nightly load")
        txn.write(orders, key=b"k", value=b"v" * 3000)
        txn.flush()
        await_text(driver, "#oldest", str(txn.id))
        await_text(driver, "#oldest", "nightly load")
        txn.commit()
        eventually(lambda: str(txn.id) not in text_of(driver, "#oldest"), "it is gone again")
        await_text(driver, "#rounds", "direct")
        await_text(driver, "#stream-title", orders)
        await_text(driver, "#segments", "0.#epoch.0")
        client.admin.scale(orders, seal=[0], ranges=[(0, 0.25), (0.25, 0.5)])
        await_text(driver, "#segments", "2.#epoch.1")
        await_text(driver, "#epochs", "scale")
        eventually(
            lambda: driver.execute_script("return document.getElementById('lineage').naturalWidth") > 300, "the picture"
        )
        await_text(driver, "#hour", "Commits/s")
        eventually(lambda: "looking for the first time" not in text_of(driver, "#doctor-when"), "the doctor has looked")
        assert driver.execute_script("return window.loadedOnce") is True
        assert complaints(driver) == []


def test_a_transaction_is_aborted_with_token_and_confirmation(
    client: Bridge, orders: str, page: str, tmp_path: Path
) -> None:
    client.admin.create_stream(orders)
    kept, txn = client.begin(orders), client.begin(orders, timeout=timedelta(minutes=5))
    eventually(lambda: len(client.admin.transactions()) == 2, "they have records")
    with browser(tmp_path / "profile") as driver:
        driver.get(page)
        await_text(driver, "#oldest", str(txn.id))
        assert shown(driver, "td button") == [], "nobody acts without a token"
        assert shown(driver, "#scale") == []
        unlock(driver, "another-token-of-16")
        await_text(driver, "#dialog-fault", "the token is missing or wrong")
        click(driver, "#dialog-cancel")
        assert shown(driver, "td button") == []
        unlock(driver)
        await_text(driver, "#notice", "The token is right")
        click(driver, f"#oldest tr[data-key='{txn.id}'] button[aria-label^='Abort']")
        await_text(driver, "#dialog-about", str(txn.id))
        click(driver, "#dialog-cancel")
        assert len(client.admin.transactions()) == 2, "who thinks better of it has done nothing"
        click(driver, f"#oldest tr[data-key='{txn.id}'] button[aria-label^='Extend']")
        type_into(driver, "#dialog-fields input", "5")
        click(driver, "#dialog-go")
        await_text(driver, "#notice", f"Transaction {txn.id} may stay open until")
        click(driver, f"#oldest tr[data-key='{txn.id}'] button[aria-label^='Abort']")
        type_into(driver, "#dialog-fields input", "it was in the way")
        click(driver, "#dialog-go")
        await_text(driver, "#notice", f"Aborted {txn.id}.")
        eventually(lambda: str(txn.id) not in text_of(driver, "#oldest"), "it is gone")
        with pytest.raises(TransactionAbortedError, match="it was in the way"):
            txn.commit()
        click(driver, "#scale")
        click(driver, "#dialog-fields input[type=checkbox]")
        click(driver, "#dialog-go")
        await_text(driver, "#notice", "is in epoch 1 now")
        assert len(client.admin.history(orders).active.segments) == 2
        click(driver, "#lock")
        eventually(lambda: not shown(driver, "td button"), "locked, it only shows")
        assert (
            driver.execute_script("return Object.keys(sessionStorage).length + Object.keys(localStorage).length") == 0
        )
        assert TOKEN not in driver.current_url
        kept.commit()


def test_a_page_without_a_token_has_no_buttons(cluster: AnyCluster, root: str, orders: str, tmp_path: Path) -> None:
    with paged_coordinator(cluster, root, "one", tmp_path, token="") as (url, _):
        eventually(lambda: read_page(url, "overview")["coordinator"]["healthy"], "it is there")
        with (
            rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root) as b,
            browser(tmp_path / "profile") as driver,
        ):
            b.admin.create_stream(orders)
            txn = b.begin(orders)
            driver.get(url)
            await_text(driver, "#oldest", str(txn.id))
            await_text(driver, "#stream-title", orders)
            assert shown(driver, "main button, header button") == []
            txn.abort()


def test_what_clients_say_of_themselves_is_text(
    cluster: AnyCluster, root: str, client: Bridge, orders: str, page: str, tmp_path: Path
) -> None:
    client.admin.create_stream(orders)
    txn = client.begin(orders, label=HOSTILE + TURNED)
    with browser(tmp_path / "profile") as driver:
        driver.get(page)
        await_text(driver, "#oldest", HOSTILE + SHOWN)
        unlock(driver)
        await_text(driver, "#notice", "The token is right")
        click(driver, f"#oldest tr[data-key='{txn.id}'] button[aria-label^='Abort']")
        await_text(driver, "#dialog-about", HOSTILE)
        assert (
            driver.find_elements("css selector", "main img:not(#lineage), main script, dialog img, dialog script") == []
        )
        assert "executed" not in driver.title
        assert complaints(driver) == [], "there was nothing to stop"
        blocked = driver.execute_script(
            "try { document.body.innerHTML = '<b>x</b>'; return false } "
            "catch (fault) { return fault instanceof TypeError }"
        )
        assert blocked is True, "and markup made of text would have been stopped"
    txn.abort()


@pytest.mark.parametrize(("width", "dark"), list(product((NARROW, WIDE), (False, True))))
def test_everybody_can_read_it(client: Bridge, orders: str, page: str, tmp_path: Path, width: int, dark: bool) -> None:
    client.admin.create_stream(orders, segments=3)
    txn = client.begin(orders, label="a label without any gap " + "x" * 300)
    txn.write(orders, key=b"k", value=b"v")
    txn.flush()
    with browser(tmp_path / "profile", width, dark=dark) as driver:
        driver.get(page)
        await_text(driver, "#oldest", str(txn.id))
        await_text(driver, "#segments", "0.#epoch.0")
        unlock(driver)
        await_text(driver, "#notice", "The token is right")
        sizes = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert sizes[0] <= sizes[1] == width, "nothing is beyond the edge"
        background = driver.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
        assert (background == "rgb(20, 24, 31)") is dark
        assert faults_for_readers(driver) == []
        assert low_contrasts(driver) == []
        click(driver, f"#oldest tr[data-key='{txn.id}'] button[aria-label^='Abort']")
        assert driver.execute_script("return document.querySelector('dialog').contains(document.activeElement)")
        box = driver.execute_script(
            "const box = document.querySelector('dialog').getBoundingClientRect(); return [box.left, box.right]"
        )
        assert 0 <= box[0] < box[1] <= width
        assert complaints(driver) == []
    txn.abort()


@pytest.mark.skipif(SCREENSHOT not in os.environ, reason=f"{SCREENSHOT} says where the picture of the README goes")
def test_the_picture_of_the_readme(cluster: AnyCluster, root: str, client: Bridge, page: str, tmp_path: Path) -> None:
    """A minute of a shop: streams that are scaled, a rolling commit, loads that go on, and clients that commit."""
    orders, clicks = "shop/orders", "shop/clicks"
    for stream, segments in ((orders, 3), (clicks, 2)):
        client.admin.create_stream(stream, segments=segments)
    late = client.begin(orders, label="night 2026-11-25")
    for number in range(30):
        late.write(orders, key=b"%d" % number, value=b"v" * 200)
    client.admin.scale(orders, seal=[0], ranges=[(0, 1 / 6), (1 / 6, 1 / 3)])
    late.commit()
    client.admin.scale(orders, seal=[1, 2], ranges=[(1 / 3, 1)])
    loads = []
    for label, size, hours in (("backfill of 2019", 60, 48), ("import of suppliers", 7, 2), ("campaign", 1, 24)):
        loads.append(client.begin(orders, clicks, label=label, timeout=timedelta(hours=hours)))
        for number in range(size):
            loads[-1].write(orders, key=b"%d" % number, value=os.urandom(20_000))
        loads[-1].flush()
    with (
        paged_coordinator(cluster, root, "two", tmp_path, ROLLBRIDGE_COORDINATOR_PAGE_URL="http://shop-2:9465/"),
        browser(tmp_path / "profile") as driver,
    ):
        driver.get(f"{page}#/stream/{orders}")
        await_text(driver, "#stream-title", orders)
        points = 0
        while points < 9:
            for number in range(20):
                with client.transaction(orders, clicks) as txn:
                    for each in range(10 + number):
                        txn.write(orders, key=b"%d.%d" % (number, each), value=os.urandom(300))
                        txn.write(clicks, key=b"%d" % each, value=b"c")
            points = len(read_page(page, "groups/shop/default/last-hour")["points"])
        eventually(
            lambda: driver.execute_script("return document.getElementById('lineage').naturalWidth") > 500, "drawn"
        )
        eventually(lambda: "–" not in text_of(driver, "#segments tbody td:nth-child(3)"), "rates are measured")
        await_text(driver, "#coordinators", "two")
        box = driver.execute_script(
            "return document.getElementById('epochs-title').getBoundingClientRect().top + scrollY"
        )
        clip = {"x": 0, "y": 0, "width": WIDE, "height": box, "scale": 0.75}
        how = {"format": "webp", "quality": 60, "captureBeyondViewport": True, "clip": clip}
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", how)
    for txn in loads:
        txn.abort()
    Path(os.environ[SCREENSHOT]).write_bytes(base64.b64decode(shot["data"]))


def faults_for_readers(driver: WebDriver) -> list[Any]:
    """What a screen reader would stumble over: names, heads, levels of headings, landmarks, what takes the focus."""
    found: list[Any] = driver.execute_script(
        """
        const faults = [], seen = (item) => item.getClientRects().length > 0;
        const all = (selector) => [...document.querySelectorAll(selector)].filter(seen);
        if (document.documentElement.lang !== "en") faults.push("no language");
        for (const name of ["header", "main", "footer"])
          if (all(`body > ${name}`).length !== 1) faults.push(`landmark ${name}`);
        let level = 0;
        for (const heading of all("h1, h2, h3, h4")) {
          const now = Number(heading.tagName[1]);
          if (now > level + 1) faults.push(`heading ${heading.textContent} jumps`);
          if (!heading.textContent.trim()) faults.push(`heading ${heading.id} is empty`);
          level = now;
        }
        if (all("h1").length !== 1) faults.push("not one h1");
        for (const table of all("table")) {
          const heads = table.tHead.rows[0].cells.length;
          if ([...table.tHead.rows[0].cells].some((cell) => cell.scope !== "col" || !cell.textContent))
            faults.push(`heads of ${table.id}`);
          for (const row of table.tBodies[0].rows) {
            if (row.cells.length !== heads) faults.push(`a row of ${table.id} has ${row.cells.length} cells`);
            if (row.cells[0].scope !== "row") faults.push(`a row of ${table.id} has no head`);
          }
        }
        for (const region of all("[role=group], section, dialog")) {
          const by = region.getAttribute("aria-labelledby");
          if (!by || !document.getElementById(by).textContent) faults.push(`region ${region.id} has no name`);
        }
        for (const scrolled of all(".wide"))
          if (scrolled.tabIndex !== 0) faults.push("a region that scrolls does not take the focus");
        for (const item of all("button, a"))
          if (!(item.getAttribute("aria-label") || item.textContent).trim())
            faults.push(`${item.outerHTML} has no name`);
        for (const image of all("img, [role=img]"))
          if (!(image.alt || image.getAttribute("aria-label"))) faults.push(`${image.outerHTML} has no text`);
        const ids = [...document.querySelectorAll("[id]")].map((item) => item.id);
        if (new Set(ids).size !== ids.length) faults.push("an id is there twice");
        return faults;
        """
    )
    return found


def low_contrasts(driver: WebDriver) -> list[Any]:
    """Texts whose contrast to what is behind them is below 4.5 (WCAG 2.2, 1.4.3), with it."""
    found: list[Any] = driver.execute_script(
        """
        const channels = (text) => text.match(/[\\d.]+/g).map(Number);
        const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
          .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
          .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
        const behind = (item) => {
          for (let at = item; at; at = at.parentElement) {
            const [r, g, b, a = 1] = channels(getComputedStyle(at).backgroundColor);
            if (a > 0) return [r, g, b];
          }
          return [255, 255, 255];
        };
        const faults = [];
        for (const item of document.querySelectorAll("body *")) {
          const has = [...item.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
          if (!has || !item.getClientRects().length || item.closest("svg")) continue;
          const [one, two] = [light(channels(getComputedStyle(item).color)), light(behind(item))].sort((a, b) => b - a);
          const contrast = (one + 0.05) / (two + 0.05);
          if (contrast < 4.5) faults.push(`${contrast.toFixed(2)} ${item.outerHTML.slice(0, 120)}`);
        }
        return faults;
        """
    )
    return found
