#!/usr/bin/env python3
"""Makes prose_en.txt and chat_multi.txt from the HTML of The Rust Programming Language, as rustup installs it.

    python3 make.py "$(rustc --print sysroot)/share/doc/rust/html/book" .

Prose: headings, paragraphs and list items, chapter by chapter, each text once; no code. Chat: questions about the headings
of later chapters, answered with what follows them. Nothing of one file is in the other.
"""
import html.parser
import pathlib
import re
import sys

PROSE_BYTES = 240_000
CHAT_BYTES = 120_000
SKIPPED = {"pre", "script", "style", "figure", "table", "svg", "button"}
BLOCKS = {"p", "li", "h1", "h2", "h3", "h4"}
QUESTIONS = ["What should I know about {}?", "Can you explain {} to me?", "And {}?", "Please tell me more about {}.",
             "How does the book describe {}?"]


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.inside, self.skipping, self.block, self.words, self.blocks = False, 0, None, [], []

    def finish(self):
        text = re.sub(r"\s+", " ", "".join(self.words)).strip()
        if len(text) > 2:
            self.blocks.append((self.block, text))
        self.words, self.block = [], None

    def handle_starttag(self, tag, attrs):
        self.inside = self.inside or tag == "main"
        if tag in SKIPPED:
            self.skipping += self.inside
        elif tag in BLOCKS and self.inside and not self.skipping:
            self.finish()
            self.block = tag

    def handle_endtag(self, tag):
        if tag in SKIPPED:
            self.skipping = max(0, self.skipping - self.inside)
        elif tag in BLOCKS or tag == "main":
            self.finish()
            self.inside = self.inside and tag != "main"

    def handle_data(self, data):
        if self.inside and self.block and not self.skipping:
            self.words.append(data)


def main():
    book, target = map(pathlib.Path, sys.argv[1:])
    seen, blocks = set(), []
    for path in sorted(book.glob("ch*.html")):
        reader = Reader()
        reader.feed(path.read_text(encoding="utf-8"))
        for block in reader.blocks:
            if block[1] not in seen:
                seen.add(block[1])
                blocks.append(block)
    prose, size = [], 0
    while size < PROSE_BYTES:
        prose.append(blocks.pop(0)[1])
        size += len(prose[-1].encode()) + 2
    (target / "prose_en.txt").write_text("\n\n".join(prose) + "\n", encoding="utf-8")
    turns, size, answer, heading = [], 0, [], None
    for kind, text in blocks:
        if kind[0] != "h":
            answer.append(text)
            continue
        if heading and len(answer) > 1:
            question = QUESTIONS[len(turns) % len(QUESTIONS)].format(heading)
            turns.append(f"\x01{question}\x02" + "\n\n".join(answer))
            size += len(turns[-1].encode())
            if size >= CHAT_BYTES:
                break
        heading, answer = text, []
    (target / "chat_multi.txt").write_text("".join(turns) + "\n", encoding="utf-8")


main()
