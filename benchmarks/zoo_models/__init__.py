"""The models of the zoo."""

from benchmarks.zoo_models.gradients import ROWS as GRADIENTS
from benchmarks.zoo_models.idioms import ROWS as IDIOMS
from benchmarks.zoo_models.language import ROWS as LANGUAGE
from benchmarks.zoo_models.layers import ROWS as LAYERS
from benchmarks.zoo_models.nets import ROWS as NETS
from benchmarks.zoo_models.recent import ROWS as RECENT
from benchmarks.zoo_models.row import Row
from benchmarks.zoo_models.sciences import ROWS as SCIENCES
from benchmarks.zoo_models.senses import ROWS as SENSES
from benchmarks.zoo_models.tricks import ROWS as TRICKS

ROWS: list[Row] = [*LANGUAGE, *SENSES, *NETS, *SCIENCES, *IDIOMS, *TRICKS, *RECENT, *LAYERS, *GRADIENTS]
