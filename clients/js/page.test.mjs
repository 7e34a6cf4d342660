// The web page in a real browser, without a head: with the keyboard, in a narrow window, and nobody else asked.
import assert from "node:assert/strict";
import { test } from "node:test";
import puppeteer from "puppeteer-core";

const url = process.env.TROIKA_URL;
const executablePath = process.env.CHROMIUM;
const skip = executablePath ? false : "no Chromium here: set CHROMIUM or install it";

test("the page", { skip }, async () => {
  const browser = await puppeteer.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
  try {
    const page = await browser.newPage();
    await page.setViewport({ width: 360, height: 640 });
    const [asked, problems] = [[], []];
    page.on("request", (request) => asked.push(request.url()));
    page.on("pageerror", (error) => problems.push(String(error)));
    page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
    await page.goto(url);

    // The key, by keyboard.
    await page.waitForSelector("#key-form:not([hidden])");
    problems.length = 0; // The browser reports the 401 that brought the form up.
    await page.focus("#key");
    await page.keyboard.type(process.env.TROIKA_KEY);
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector("#health").textContent === "ok");
    assert.match(await page.$eval("#facts", (facts) => facts.textContent), /model.*devices.*in flight/);

    // A question with reasoning, by keyboard.
    await page.select("#effort", "low");
    // A model that knows nothing may have no thought at all; one of a few answers has.
    for (let round = 0, thought = 0; thought === 0; round += 1) {
      assert.ok(round < 10, "no reasoning came");
      await page.focus("#prompt");
      await page.keyboard.type("Write a function.");
      await page.keyboard.press("Enter");
      const state = await page.waitForFunction(
        () => {
          const thoughts = [...document.querySelectorAll(".thought")].map((thought) => thought.textContent.length);
          return Math.max(...thoughts) > 0 || document.querySelector("#stop").disabled ? { longest: Math.max(...thoughts) } : null;
        },
        { timeout: 60_000 },
      );
      thought = (await state.jsonValue()).longest;
    }
    // Escape ends an answer; this one may have ended by itself.
    await page.keyboard.press("Escape");
    await page.waitForFunction(() => document.querySelector("#stop").disabled);
    assert.equal(await page.$eval("#notice", (notice) => notice.hidden), true);
    assert.equal(await page.$eval(".user .text", (text) => text.textContent), "Write a function.");

    // The request is in the table, and nothing is wider than the window.
    await page.waitForFunction(() => document.querySelectorAll("#requests tr").length > 0, { timeout: 10_000 });
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= window.innerWidth), "no sideways scrolling");
    // The tab key reaches what can be used.
    await page.focus("#prompt");
    const reached = [];
    for (let step = 0; step < 4; step += 1) {
      await page.keyboard.press("Tab");
      reached.push(await page.evaluate(() => document.activeElement.id));
    }
    assert.ok(reached.includes("effort") && reached.includes("send"), reached.join());
    assert.deepEqual(asked.filter((address) => !address.startsWith(url) && !address.startsWith("data:")), []);
    assert.deepEqual(problems, []);
  } finally {
    await browser.close();
  }
});
