"""The rows of a spec, listed by the reader of its format. No torch."""

import os
from glob import glob
from pathlib import Path

from braceexpand import braceexpand

from m1clip.config import DataConfig
from m1clip.data import caption_datasets, folders, hf_datasets, tables, webdataset
from m1clip.data.rows import Listing
from m1clip.data.sources import SCHEMES
from m1clip.format import did_you_mean


def list_rows(spec: str, config: DataConfig) -> Listing:
    scheme, colon, path = spec.partition(":")
    if not colon or scheme not in SCHEMES:
        return _list_paths(expand_paths(spec), config)
    if scheme == "hf":
        return hf_datasets.list_dataset(path, config)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{spec} needs the folder of {scheme}; there is no folder {path!r}")
    if scheme == "coco":
        return caption_datasets.list_coco(folder)
    return caption_datasets.list_flickr(folder, scheme, config)


def _list_paths(paths: list[Path], config: DataConfig) -> Listing:
    """Shards, and Parquet files that contain images, are listed together; other paths one by one."""
    suffixes = {path.suffix.lower() for path in paths if path.is_file()}
    if suffixes == {".tar"} and not any(path.is_dir() for path in paths):
        return webdataset.list_shards(paths)
    if suffixes == {".parquet"} and tables.contains_images(paths[0]):
        return hf_datasets.list_parquet(paths, config)
    return folders.join_listings([_list_path(path, config) for path in paths])


def _list_path(path: Path, config: DataConfig) -> Listing:
    suffix = path.suffix.lower()
    if path.is_dir():
        for pattern in ("*.tar", "*.parquet", "data/*.parquet"):
            if files := sorted(path.glob(pattern)):
                return _list_paths(files, config)
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            return hf_datasets.list_dataset(str(path), config)
        return folders.list_folder(path, config)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if suffix in (".txt", ".token"):
        return caption_datasets.list_text_file(path, config)
    if suffix not in tables.TABLE_SUFFIXES:
        formats = ", ".join(tables.TABLE_SUFFIXES)
        raise ValueError(f"{path} cannot be read; expected a folder, {formats} or uncompressed .tar shards")
    listing = caption_datasets.list_json(path) if suffix == ".json" else None
    return listing or tables.list_table(path, config)


def expand_paths(spec: str) -> list[Path]:
    """The files of a path that may contain {000..099} or *."""
    spec = os.path.expanduser(spec)
    names = [spec] if os.path.exists(spec) else list(braceexpand(spec))
    names = [path for name in names for path in (sorted(glob(name)) if "*" in name else [name])]
    if not any(map(os.path.exists, names)):
        hint = f"; {did_you_mean(spec.partition(':')[0], SCHEMES)}" if ":" in spec else ""
        raise FileNotFoundError(f"no data source {spec!r}: there is no such file or folder{hint}")
    return [Path(name) for name in names]
