"""Where: the site language, and the sites that it selects on a model. Nothing here attaches hooks.

`kedge.sites` is both this package and the function that lists a model's sites; Python binds a
package to its name in the parent as soon as anything in it is imported, so the package itself can
be called.
"""

from kedge.calls.called_package import make_callable

make_callable("kedge.sites", "kedge.examination.model_sites")
