"""From traces of single ranks to the step of the whole job."""
