"""Quality of the synthetic images of a run (`output.quality: true`): measured, drawn, and kept in its directory."""

from typing import TYPE_CHECKING, Any

from raysim.core.files import disk_errors
from raysim.core.records import Dataset, Synthetic
from raysim.federation.synthesis import sample_of
from raysim.lifecycle.directory import RunDirectory

if TYPE_CHECKING:
    from raysim.ui.display import Display

MOST_IMAGES = 2000  # enough for two digits of every rate


def measure_run(
    dataset: Dataset, synthetic: Synthetic, seed: int, directory: RunDirectory, display: "Display"
) -> dict[str, Any] | None:
    """Measure the quality, write quality.json and figures, print the table; returns the quality.

    The figures: quality.png, and, where the images can be drawn, real_and_synthetic.png and nearest_pairs.png.  None
    where a run has no synthetic or no test images.
    At most MOST_IMAGES of the run's images are used, spread evenly over clients and classes; the real images that
    they are compared with are of the same classes in the same numbers.
    """
    if not synthetic.quota_KC.any() or not len(dataset.test_labels_N):
        return None
    from raysim.generation.quality import measure, table
    from raysim.ui import plots
    from raysim.ui.quality_plots import nearest_pairs, quality_figure

    images, labels_M = sample_of(synthetic, MOST_IMAGES)
    display.line(f"quality: two classifiers are trained to judge {len(images):,} of the images, a minute or more ...")
    quality = measure(dataset, images, labels_M, seed)
    directory.write_json("quality.json", quality)
    figure = directory.figures / "quality.png"
    with disk_errors(figure):
        quality_figure(quality, figure)
    if dataset.channels in (1, 3):
        real = dataset.train_images, dataset.train_labels_N
        path = directory.figures / "real_and_synthetic.png"
        pairs = directory.figures / "nearest_pairs.png"
        with disk_errors(pairs):
            nearest_pairs(images, dataset.train_images, quality["distance"]["closest"], pairs)
        with disk_errors(path):
            plots.comparison_grid(real, (images, labels_M), dataset.class_names, path)
    for line in table(quality):
        display.line(line)
    return quality
