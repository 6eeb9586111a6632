"""The verb `image`: import container images for Pyxis and Enroot, list and verify them."""

import argparse
import os
import sys
from pathlib import Path

from bench.cli import arguments


def _add_image(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _image,
        help="import container images for Pyxis and Enroot into a folder, list and verify them",
        example="import nvcr.io/nvidia/pytorch:25.11-py3 --dir /shared/images",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="import|list|verify")
    raw = argparse.RawDescriptionHelpFormatter
    source = actions.add_parser(
        "import",
        help="import an image if the folder does not have it yet",
        epilog=arguments.pasteable("runstop image import nvcr.io/nvidia/pytorch:25.11-py3 --dir /shared/images"),
        formatter_class=raw,
    )
    source.add_argument(
        "source", metavar="SOURCE", help="nvcr.io/nvidia/pytorch:TAG, docker://…, dockerd://IMAGE:TAG, or a .sqsh file"
    )
    source.add_argument(
        "--again",
        dest="reimport",
        action="store_true",
        help="import even if the folder has it: a tag may point to a new image",
    )
    listed = actions.add_parser(
        "list",
        help="show a folder's images, and files in it that are not images",
        epilog=arguments.pasteable("runstop image list --dir /shared/images"),
        formatter_class=raw,
    )
    file = actions.add_parser(
        "verify",
        help="read an image file in full and report what is wrong with it",
        epilog=arguments.pasteable("runstop image verify /shared/images/NAME-sha256-0123456789ab.sqsh"),
        formatter_class=raw,
    )
    file.add_argument("file", type=Path, metavar="FILE")
    for action in (source, listed):
        action.add_argument("--dir", type=Path, help="folder of images (default: $IMAGES, else images)")
    for action in (source, file):
        action.add_argument(
            "--arch", choices=("x86_64", "aarch64"), help="architecture of the nodes (default: that of this machine)"
        )
    for action in (source, listed, file):
        arguments.takes_json(action)


def _image(args: argparse.Namespace) -> int:
    return {"import": _import_image, "list": _list_images, "verify": _verify_image}[args.action](args)


def _folder(args: argparse.Namespace) -> Path:
    folder: Path = args.dir or Path(os.environ.get("IMAGES", "images"))
    return folder


def _import_image(args: argparse.Namespace) -> int:
    from bench.console import images as image_sheets
    from bench.console import sheet
    from bench.images import importer

    options = importer.ImportOptions(
        architecture=args.arch, reimport=args.reimport, progress=image_sheets.show_progress
    )
    imported = importer.import_image(
        args.source, _folder(args), options=options, say=lambda line: print(line, file=sys.stderr, flush=True)
    )
    if args.json:
        from bench import answers

        answers.show(answers.imported_image(imported))
    else:
        sheet.show(image_sheets.imported_sheet(imported))
    return 0


def _list_images(args: argparse.Namespace) -> int:
    from bench.console import images as image_sheets
    from bench.console import sheet
    from bench.images import store as image_folder

    folder = _folder(args)
    entries = image_folder.entries(folder)
    if args.json:
        from bench import answers

        answers.show(*map(answers.listed_image, entries))
    else:
        sheet.show(image_sheets.list_sheet(folder, entries))
    return 0


def _verify_image(args: argparse.Namespace) -> int:
    from bench.console import images as image_sheets
    from bench.console import sheet
    from bench.images import store

    record, faults = store.verify(args.file, architecture=args.arch)
    if args.json:
        from bench import answers

        size = args.file.stat().st_size if args.file.exists() else None
        answers.show(answers.image(args.file, size_bytes=size, record=record, findings=faults))
    else:
        sheet.show(image_sheets.verified_sheet(args.file, record, faults))
    return 1 if faults else 0


VERBS = (_add_image,)
