from hypothesis import settings
from tests.cli.run import test_reuse as t
test_pairs = settings(max_examples=2000, deadline=None)(t.test_any_edit_of_any_file_has_the_rows_of_a_run_without_reuse)
