# Quantmill: every served format of a language model, measured by one ruler. The main job: snakemake --cores 8 report
import gc

from snakemake.utils import min_version

min_version("9.27")
# Planning allocates long-lived objects; garbage collection took 25% of its time.
gc.set_threshold(100_000)

if not workflow.overwrite_configfiles:  # a study's own --configfile replaces the demo instead of adding to it

    configfile: "config/config.yaml"


include: "rules/common.smk"


for registration in sorted(RULES.glob("[ef]*/*.smk")):  # engines, formats

    include: registration


STUDY = check_study(config)
CELLS = {(each.model, each.name): each for each in cells.of_study(STUDY, REGISTRY)}


wildcard_constraints:
    model="|".join(map(re.escape, STUDY["models"])),  # only models of the study have rules


# `priority` in the rules completes rows early, cheap ones first. 1000: scores of existing artifacts. 100: their speed,
# the reference's first. 20: the reference's build. 10: other builds without calibration, and inputs of all builds.
# 1: MLC and the noise floor. 0: calibration and quantizers. Snakemake adds priorities up, hence the steps of ten.
include: "rules/lock.smk"
include: "rules/environments.smk"
include: "rules/weights.smk"
include: "rules/prebuilt.smk"
include: "rules/build.smk"
include: "rules/tokens.smk"
include: "rules/measure.smk"
include: "rules/loads.smk"
include: "rules/tasks.smk"
include: "rules/report.smk"
include: "rules/publish.smk"


onstart:
    heed_signals()
    work_alone()
    report_while_running()


onsuccess:
    summarise_report()


onerror:
    report_the_rest()


rule report:
    default_target: True
    input:
        rules.page.output,  # all: with the page alone, Snakemake would not notice a deleted table


rule all:
    input:
        rules.report.input,
        artifacts(),
