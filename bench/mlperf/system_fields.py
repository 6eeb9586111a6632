"""The fields of MLPerf's system description, systems/<system>.json."""

NEEDED = (
    *("submitter", "division", "status", "system_name", "number_of_nodes"),
    *("host_processors_per_node", "host_processor_model_name", "host_processor_core_count", "host_memory_capacity"),
    *("host_storage_type", "host_storage_capacity", "host_networking", "host_networking_topology"),
    *("host_memory_configuration", "accelerators_per_node", "accelerator_model_name", "accelerator_host_interconnect"),
    *("accelerator_memory_configuration", "accelerator_memory_capacity", "accelerator_interconnect", "cooling"),
    *("framework", "other_software_stack", "operating_system"),
)
OPTIONAL = (
    *("host_processor_vcpu_count", "host_processor_frequency", "host_processor_caches", "host_processor_interconnect"),
    *("accelerator_frequency", "accelerator_on-chip_memories", "accelerator_interconnect_topology"),
    *("hw_notes", "sw_notes"),
)
FIELDS = (*NEEDED, *OPTIONAL)
"""The fields of a description. All are text: the official checker concatenates them.

Sources: the system description checker of mlperf-logging 4.1.68, which is the same for all rulesets. Which fields need
a meaningful answer is from MLCommons' submission rules, section "<system_desc_id>.json metadata" (cores may be given as
vCPUs instead).
"""
COUNTS = ("number_of_nodes", "host_processors_per_node", "accelerators_per_node")
"""Fields that MLPerf's result summarizer reads as whole numbers."""
OF_ACCELERATORS = tuple(field for field in NEEDED if field.startswith("accelerator_"))
