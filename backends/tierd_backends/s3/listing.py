"""A page of a bucket's listing, parsed from the server's XML."""

from __future__ import annotations

import re
import urllib.parse
from typing import Final, NamedTuple
from xml.etree import ElementTree

from tierd.types import BlockKey
from tierd_backends.s3.failure import FailureKind, S3Error

_ANY: Final = "{*}"


class ListedObject(NamedTuple):
    """An object that holds a block of this tier."""

    key: BlockKey
    size_bytes: int


class Page(NamedTuple):
    """Part of a listing. `names` has all its objects, `last` is the last name, and `token`
    requests the next page ("" if there is none)."""

    objects: list[ListedObject]
    names: list[str]
    last: str
    token: str


def parse_page(body: bytes, ours: re.Pattern[str]) -> Page:
    """Parse a page; `ours` matches names of blocks, scope and hash in hex. Raises S3Error, also if
    there are more objects and the server does not say how to get them."""
    objects, names, last = [], [], ""
    try:
        root = ElementTree.fromstring(body)
        if root.tag.rpartition("}")[2] != "ListBucketResult":
            raise ValueError(f"a document of type {root.tag}")
        for each in root.iterfind(f"{_ANY}Contents"):
            last = urllib.parse.unquote(each.findtext(f"{_ANY}Key", ""))
            names.append(last)
            match = ours.fullmatch(last)
            if match:
                key = BlockKey(bytes.fromhex(match[1]), bytes.fromhex(match[2]))
                objects.append(ListedObject(key, int(each.findtext(f"{_ANY}Size", "0"))))
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        # LookupError is an encoding that Python does not know.
        text = f"it does not speak S3: its reply is not a listing ({error})"
        raise S3Error(FailureKind.PEER, text) from error
    truncated = root.findtext(f"{_ANY}IsTruncated")
    token = root.findtext(f"{_ANY}NextContinuationToken", "") if truncated == "true" else ""
    if truncated not in ("true", "false") or (truncated == "true" and not token):
        text = "it does not say where its listing continues: does it know ListObjectsV2?"
        raise S3Error(FailureKind.PEER, text)
    return Page(objects, names, last, token)
