"""`folb data`: the datasets."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from folb.cli import options as common


def add(commands: Any) -> None:
    about = commands.add_parser("data", help="list, describe and download datasets")
    actions = about.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = common.command(actions, "list", "list the datasets, and whether their files are here", _list)
    listing.add_argument("--json", action="store_true", help=common.JSON)
    info = common.command(actions, "info", "show the devices, samples, sizes and labels of a dataset", _info)
    info.add_argument("dataset", metavar="NAME", help=common.DATASET)
    info.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of `folb list`")
    info.add_argument("--out", metavar="PATH", help="draw sizes and labels by device into this file or directory")
    info.add_argument("--json", action="store_true", help=common.JSON)
    fetch = common.command(actions, "fetch", "download a dataset's files", _fetch)
    says = "mnist, femnist, cifar10, cifar100, shakespeare, sent140 or glove"
    fetch.add_argument("dataset", metavar="NAME", help=says)
    common.command(actions, "path", "print the data directory", _path)


def _list(options: argparse.Namespace) -> None:
    from folb.cli import dataset_facts, tables

    known = dataset_facts.known()
    if options.json:
        print(json.dumps(known))
        return
    tables.show_rows([(one["name"], one["state"], one["says"]) for one in known["datasets"]])
    print(f"\ndata directory: {known['directory']}")


def _info(options: argparse.Namespace) -> None:
    from folb.cli import dataset_facts

    path = None if options.out is None else dataset_facts.picture(options.dataset, options.out)
    federation = dataset_facts.load(options.dataset, common.settings(options.set))
    if options.json:
        print(json.dumps(dataset_facts.facts(options.dataset, federation)))
    else:
        dataset_facts.describe(options.dataset, federation)
    if path is not None:
        dataset_facts.draw(federation, path)
        print(f"\nwritten to {path}", file=sys.stderr if options.json else sys.stdout)


def _fetch(options: argparse.Namespace) -> None:
    from folb.cli import dataset_facts

    for path in dataset_facts.get(options.dataset):
        print(path)


def _path(options: argparse.Namespace) -> None:
    from folb.data import source_files

    print(source_files.directory())
