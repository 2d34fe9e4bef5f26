"""m1clip index export: the vectors of a searched folder for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from m1clip.console import Console
from m1clip.format import plural


@dataclass(frozen=True)
class Args:
    """Write the vectors of a folder that was searched, with paths, sizes and dates, for NumPy and vector databases.

    m1clip index export photos/ --to parquet --out photos.parquet   LanceDB, DuckDB, pyarrow, datasets
    m1clip index export photos/ --to npy --out vectors/             vectors.npy and images.jsonl
    m1clip index export photos/ --to qdrant --out qdrant/           bodies of Qdrant's requests
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder that `m1clip search` has indexed."""
    out: Annotated[Path, tyro.conf.arg(metavar="PATH")]
    """File or folder to write."""
    to: Literal["parquet", "npy", "qdrant"] = "parquet"
    """Format."""
    model: Annotated[str | None, tyro.conf.arg(metavar="RUN|MODEL")] = None
    """The model of the search; by default the newest run."""
    runs: Path = Path("runs")
    """Folder of all runs."""


def main(args: Args) -> None:
    from m1clip.onnx_cache import find_onnx
    from m1clip.onnx_model import load_onnx
    from m1clip.search.export import export_index
    from m1clip.search.index import index_of
    from m1clip.search.scan import existing_folder

    folder = existing_folder(args.folder)
    model = load_onnx(find_onnx(args.runs, args.model, Console()))
    out = args.out.expanduser()
    count = export_index(index_of(model), folder, args.to, out)
    print(f"{out}: vectors of {plural(count, 'file')}, {model.config.embed_dim} numbers each")
