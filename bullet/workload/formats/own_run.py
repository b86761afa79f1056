"""requests.parquet of a run of ours: what was offered, whatever became of it, so that another run can be given the same.

Its rows stand in the order in which they were closed; :data:`bullet.results.columns.REQUEST_COLUMNS` has the columns.
"""

from bullet.workload.layout import Layout

TITLE = "requests.parquet"
COLUMNS = {"id": "id", "arrival_s": "arrival_s", "prompt_tokens": "prompt_tokens", "output_tokens": "output_tokens",
           "status": "status", "admitted_s": "admitted_s", "generated_tokens": "generated_tokens"}
LAYOUT = Layout("run", ("prompt_tokens",), "output_tokens", "arrival_s", "s", "its name", whole=True, order="id")
