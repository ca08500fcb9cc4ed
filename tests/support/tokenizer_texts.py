"""Texts for comparing tokenizers: documentation, and characters that split texts in unusual places."""

import pydoc_data.topics

from hypothesis import strategies as st

CORPUS = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)[:25]]
CORPUS += ["naïve café, ελληνικά, Ünïcödé, 日本語 текст", "x = 12345 + 678\n\n\n\tif  y:", "I'll, WE'RE, don't"] * 20
HARD_TEXTS = [
    "",
    " ",
    "\n\n  \n",
    "Hello world",
    " leading and trailing ",
    "tabs\tand\r\nwindows lines\r\n\r\n",
    "1234567890 3.14 ½ ٣٤٥ Ⅷ",
    "I'll don't WE'RE it'S ’tis",
    "camelCaseHTTPServer fooBAR Ünïcödé ǅungla",
    "日本語のテキスト、中文。한국어 텍스트 ไทย हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 and marks e\u0301 n\u0303",
    "a+=b; // path/to/file ... !!! ---\n\t\treturn x;\n",
    "\u00a0nbsp\u2003em\u200bzero\ufeff",
    "      many     spaces        ",
    "\x00\x01\x7f control",
]
texts = st.text(max_size=40) | st.sampled_from(HARD_TEXTS) | st.lists(st.sampled_from(HARD_TEXTS)).map("".join)
