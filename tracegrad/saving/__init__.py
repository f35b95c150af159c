"""Functions in files: written today, loaded and differentiated years later."""

from tracegrad.saving.errors import ArtefactError as ArtefactError
from tracegrad.saving.load import load as load
from tracegrad.saving.loaded import LoadedFunction as LoadedFunction
from tracegrad.saving.loaded import LoadedFunctions as LoadedFunctions
from tracegrad.saving.save import save as save
from tracegrad.saving.variables import load_variables as load_variables
from tracegrad.saving.variables import save_variables as save_variables
from tracegrad.saving.variables import variables_of as variables_of
