"""The commands of ``python -m smoke``, a file each or for a few; ``COMMANDS`` says which file holds which."""

# Name -> module and what the list of commands says. The modules are not imported for that: some of them need torch.
COMMANDS = {
    "Your work": {
        "start": ("files", "Write the files of a lesson, with the functions to write left open."),
        "next": ("progress", "Say where you are and what to do now."),
        "watch": ("run", "Run the task's checks whenever you save."),
        "run": ("run", "Run the checks of a task, of a lesson, or of where you are."),
        "hint": ("progress", "Show one more hint of a task."),
        "status": ("progress", "Show how far you are."),
        "measure": ("measure", "Measure what a lesson's idea saves on your engine."),
        "progress": ("measure", "Draw what your lessons have saved so far."),
        "example": ("example", "Compute a task's worked example with your functions."),
        "pitfalls": ("progress", "List the known mistakes of the tasks that pass."),
        "diff": ("files", "Compare your files with the reference, once a lesson passes."),
        "mutants": ("mutants", "See which known mistakes your own test catches."),
        "reset": ("files", "Start a lesson anew; your files are kept."),
        "doctor": ("doctor", "Say whether this machine is ready."),
    },
    "Teaching and developing": {
        "grade": ("grade", "Grade a folder of submissions."),
        "export": ("export", "Write a course repository without the solutions of later lessons."),
        "accept": ("accept", "Prove the checks: listed mistakes are caught, correct variants pass."),
        "mutate": ("mutate", "Prove the checks: every small change of what students write."),
        "sync": ("sync", "Write the tables and lists that are generated."),
    },
}
