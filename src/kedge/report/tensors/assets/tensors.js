// The page of a program of tensors: all of it is there, only the theme changes.

import { startTheme } from "./theme.js";

startTheme();
document.documentElement.dataset.ready = "yes";
