# Run by `executor-server images build` and the tests in a sandbox of the image: what it promises, it must do there.
import io
from pathlib import Path

import helium
import PIL.Image
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

page = Path("page.html").absolute()
page.write_text("<meta charset=utf-8><title>Grüezi</title><button onclick='document.title = 6 * 7'>Push</button>")

driver = helium.start_chrome(page.as_uri(), headless=True)
helium.wait_until(lambda: driver.title == "Grüezi")
helium.click("Push")
helium.wait_until(lambda: driver.title == "42")
assert PIL.Image.open(io.BytesIO(driver.get_screenshot_as_png())).width > 100
helium.kill_browser()

with webdriver.Chrome() as browser:
    browser.get("data:text/html,<title>plain selenium</title>")
    WebDriverWait(browser, 10).until(lambda browser: browser.title == "plain selenium")
    version = browser.capabilities["browserVersion"]

f"Chromium {version}"
