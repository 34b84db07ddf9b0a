"""OpenVINO Model Server, at the URL where somebody runs it, with a model that was converted from the artifact.

    ovms --rest_port 8000 --model_path FOLDER --model_name NAME --task text_generation --enable_prefix_caching false

It takes and tells text. https://docs.openvino.ai/nightly/model-server/ovms_docs_rest_api_completion.html
"""

from quantmill.engines.served.attached import Attached


class Engine(Attached):
    """See `serving.attached.Attached`."""

    dialect = "openvino"
    takes_ids = tells_ids = False
    health = "/v2/health/ready"
    models = "/v3/models"
    cache_off = "start it with --enable_prefix_caching false"
