"""schemathesis: random requests made from /openapi.json, and whether the answers are as it says."""

import pathlib
import subprocess
import sys
import unittest

import server


class Schemathesis(unittest.TestCase):
    def test_no_answer_is_undocumented(self):
        # Random requests are long ones; a short context ends them.
        address = server.start("--ctx", "96")
        program = pathlib.Path(sys.executable).with_name("schemathesis")
        subprocess.run(
            [
                program, "run", address + "/openapi.json", "--seed", "1", "--max-examples", "40",
                # The example of a pull needs a network.
                "--exclude-path", "/api/pull", "--request-timeout", "60", "--checks",
                "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
            ],
            check=True,
        )


if __name__ == "__main__":
    unittest.main()
