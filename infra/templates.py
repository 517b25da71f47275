"""`python -m infra.templates`: plain CloudFormation templates and their assets, for other tools.

They are those of `cdk deploy`, except that the parameters `AssetsBucket` and `AssetsPrefix` of the
Api stack locate the assets: the CDK's bootstrap is not needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from aws_cdk import App, CfnParameter, DefaultStackSynthesizer, Stack

from infra.api.stack import ApiStack
from infra.app import add_stacks
from infra.archive import zip_folder
from infra.bundle import Bundle, make_bundle
from infra.config import DEFAULT_PATH, Config, ConfigRefused, read_config
from infra.nag_exceptions import add_checks
from infra.pip_target import ROOT

OUTPUT: Final = ROOT / "out" / "templates"
_ASSETS: Final = "assets"
_NO_IMAGE = (
    "templates need an image that is already in ECR: set `image` (`make image` creates one). To "
    "review templates that you do not deploy, use a placeholder: make template REVIEW=1"
)
# A valid name of no image: tasks with it cannot start.
PLACEHOLDER: Final = "000000000000.dkr.ecr.us-east-1.amazonaws.com/tidemill:placeholder"


def check_image(config: Config, where: str, *, is_review: bool = False) -> Config:
    """Return the configuration with an image; raises ConfigRefused if it would be built."""
    if not config.starts_workers or config.image:
        return config
    if not is_review:
        raise ConfigRefused(f"{where}: {_NO_IMAGE}.")
    return config.model_copy(update={"image": PLACEHOLDER})


def write_templates(config: Config, bundle: Bundle, folder: Path) -> list[Path]:
    """Write a template for each stack, and their assets below them; return the templates.

    Existing content of the folder is deleted. Raises ConfigRefused if the deployment builds its
    image.
    """
    check_image(config, "templates")
    with TemporaryDirectory() as outdir:
        app = _app(outdir)
        add_stacks(app, config, bundle, ROOT)
        stacks = [child for child in app.node.children if isinstance(child, Stack)]
        _add_parameters(next(stack for stack in stacks if isinstance(stack, ApiStack)))
        add_checks(app)
        made = Path(app.synth().directory)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / _ASSETS).mkdir(parents=True)
        templates = []
        for stack in stacks:
            templates.append(folder / f"{stack.node.id.lower()}.template.json")
            shutil.copy(made / stack.template_file, templates[-1])
            _write_assets(made, stack, folder / _ASSETS)
    return templates


def _app(outdir: str) -> App:
    """Return an app with the settings of cdk.json, whose assets are located by parameters."""
    context: dict[str, Any] = json.loads((ROOT / "cdk.json").read_text(encoding="utf-8"))["context"]
    synthesizer = DefaultStackSynthesizer(
        generate_bootstrap_version_rule=False,
        file_assets_bucket_name="${AssetsBucket}",
        bucket_prefix="${AssetsPrefix}",
    )
    return App(outdir=outdir, context=context, default_stack_synthesizer=synthesizer)


def _add_parameters(stack: Stack) -> None:
    """Give the stack of the Lambdas, the only one with assets, the parameters that locate them."""
    bucket, prefix = "The bucket that contains the assets", "The prefix of their keys"
    CfnParameter(stack, "AssetsBucket", description=bucket)
    CfnParameter(stack, "AssetsPrefix", description=prefix, default=f"{_ASSETS}/")


def _write_assets(made: Path, stack: Stack, folder: Path) -> None:
    manifest = json.loads((made / f"{stack.artifact_id}.assets.json").read_text(encoding="utf-8"))
    for asset in manifest["files"].values():
        path = made / asset["source"]["path"]
        [destination] = asset["destinations"].values()
        target = folder / destination["objectKey"].rpartition("}")[2]
        if path.is_dir():
            zip_folder(path, target)
        elif not path.name.endswith(".template.json"):
            shutil.copy(path, target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the templates of a configuration and print their paths."""
    parser = argparse.ArgumentParser(prog="python -m infra.templates", description=__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument(
        "--review", action="store_true", help="use a placeholder if the configuration has no image"
    )
    parsed = parser.parse_args(arguments)
    try:
        config = check_image(
            read_config(parsed.config), str(parsed.config), is_review=parsed.review
        )
        bundle = make_bundle("arm64", has_oidc=config.oidc is not None)
        written = write_templates(config, bundle, parsed.output)
    except ConfigRefused as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    if config.image == PLACEHOLDER:
        sys.stderr.write(
            f"The image is a placeholder ({PLACEHOLDER}): review these templates, but do not "
            "deploy them.\n"
        )
    sys.stdout.writelines(f"{path}\n" for path in written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
