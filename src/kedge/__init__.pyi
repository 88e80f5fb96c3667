# The public names with their types; `__init__.py` has the modules they are loaded from, and a test compares the two.

from kedge import compare as compare
from kedge import errors as errors
from kedge import figures as figures
from kedge import recipes as recipes
from kedge import rules as rules
from kedge import testing as testing
from kedge.actions.edit import add as add
from kedge.actions.edit import clamp as clamp
from kedge.actions.edit import replace as replace
from kedge.actions.edit import scale as scale
from kedge.actions.edit import zero as zero
from kedge.actions.error_if import error_if as error_if
from kedge.actions.error_if import nonfinite as nonfinite
from kedge.actions.from_hook import from_hook as from_hook
from kedge.actions.measure.meter import measure as measure
from kedge.actions.packed import packed as packed
from kedge.actions.record import record as record
from kedge.actions.skip import skip as skip
from kedge.examination.examine import examine as examine
from kedge.examination.model_sites import sites as sites
from kedge.features.extract import extract as extract
from kedge.hooks.everywhere import everywhere as everywhere
from kedge.hooks.firing.schedule import at as at
from kedge.hooks.firing.schedule import every as every
from kedge.hooks.session import Session as Session
from kedge.hooks.session import hook as hook
from kedge.hooks.session import session as session
from kedge.inspection.audit import audit as audit
from kedge.inspection.operations import operations as operations
from kedge.logged import log as log
from kedge.offload.destination import Cpu as Cpu
from kedge.offload.destination import Disk as Disk
from kedge.offload.destination import Rebuild as Rebuild
from kedge.offload.offload import offload as offload
from kedge.offload.saved_tensors import saved as saved
from kedge.report.displayed import Recording as Recording
from kedge.rules.rule import Finding as Finding
from kedge.sites.select import select as select
from kedge.watch.run.block import watch as watch

__version__: str
